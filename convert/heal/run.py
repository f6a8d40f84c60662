"""Healing from end to end: what is checked before the first step, and what is written after the last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from latentfold.convert.choices import RECOMPUTED
from latentfold.convert.dtypes import STORED, dtype_name
from latentfold.convert.errors import InputError
from latentfold.convert.files import public_name
from latentfold.convert.heal.config import HealingConfig
from latentfold.convert.heal.models import Arithmetic, Student, fastest
from latentfold.convert.heal.processes import Processes, launched, local_device
from latentfold.convert.heal.teacher import Beside, Recorded, Teacher, record
from latentfold.convert.heal.text import HealingText, healing_text
from latentfold.convert.heal.train import Healer, Training
from latentfold.convert.model.heads import ATTENTION
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.whole import load
from latentfold.convert.progress import Progress, silent
from latentfold.convert.publish.files import check_files
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import max_positions, read_config
from latentfold.convert.source.hub import download
from latentfold.convert.source.opening import is_local, open_checkpoint
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.convert.targets.registry import TARGETS
from latentfold.convert.text.documents import default_calibration, read_documents
from latentfold.convert.verify.reloaded import probe_of, reloaded_logits
from latentfold.convert.verify.written import LAYOUT_TOLERANCE
from latentfold.convert.write.output import check_output, check_space, locked_output
from latentfold.convert.write.recipe import RECIPE, HealingRecord, Recipe, read_recipe
from latentfold.convert.write.tensors import TensorPlan, into_files
from latentfold.convert.write.writer import CheckpointWriter
from latentfold.eval.inputs import check_original, refuse_evaluation_text, with_weights


@dataclass(frozen=True)
class HealingJob:
    """A healing that can begin.

    Attributes:
        teacher, converted: the original and its conversion.
        recipe: of the conversion.
        text: what is trained on and held out.
        arithmetic: where and in what.
    """

    config: HealingConfig
    teacher: Checkpoint
    converted: Checkpoint
    recipe: Recipe
    text: HealingText
    arithmetic: Arithmetic


@dataclass(frozen=True)
class HealingResult:
    """What a healing wrote.

    Attributes:
        path: the checkpoint folder.
        recipe: the contents of its latentfold.json; `recipe.healing[-1]` is this healing.
    """

    path: Path
    recipe: Recipe


def prepare(config: HealingConfig, *, weights: bool = True) -> HealingJob:
    """Check everything and fetch the original; nothing is written yet.

    Args:
        weights: whether to download a Hub model's weights, which `run` needs and `estimate` does not.

    Raises:
        InputError: not an unchanged conversion, another model's original, text that is missing, too short or meant for
            evaluation, or an output that must not be written.
    """
    folder = Path(config.converted)
    recipe = read_recipe(folder)
    documents = read_documents(config.text) if config.text else default_calibration()
    refuse_evaluation_text(documents)
    needed = [folder, *(Path(file) for file in config.text)]
    check_output(config.output, folder, overwrite=config.overwrite, needed=needed)
    check_files(folder, recipe)
    converted = with_weights(open_checkpoint(folder), None)
    teacher = _teacher(config, recipe, weights)
    for checkpoint in (teacher, converted):
        longest = max_positions(checkpoint)
        if longest is not None and config.seq_len > longest:
            raise InputError(f"seq_len {config.seq_len}: {checkpoint.name} takes at most {longest} positions")
    models = [
        StreamedModel(checkpoint, read_config(checkpoint), torch.float32, torch.device("cpu"))
        for checkpoint in (teacher, converted)
    ]
    for model, checkpoint in zip(models, (teacher, converted), strict=True):
        model.check_headers(checkpoint.headers)
    check_original(teacher.name, converted.name, models, recipe)
    check_space(config.output_path, sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    vocab = models[1].config.get_text_config().vocab_size
    text = healing_text(documents, load_tokenizer(converted), config.seq_len, vocab)
    device = config.torch_device
    dtype = fastest(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    return HealingJob(config, teacher, converted, recipe, text, Arithmetic(device, dtype))


def _teacher(config: HealingConfig, recipe: Recipe, weights: bool) -> Checkpoint:
    """The original, with its weights or with a way to read some of them.

    Raises:
        InputError: it was a folder that is not here.
    """
    name = config.teacher or recipe.source.name
    revision = config.revision or (None if config.teacher else recipe.source.revision)
    if config.teacher is None and recipe.source.revision is None and not (Path(name).is_dir() and is_local(name)):
        raise InputError(f"the original, {name}, was a folder that is not here; pass teacher")
    checkpoint = open_checkpoint(name, revision=revision, token=config.token)
    return with_weights(
        download(checkpoint, token=config.token, weights=False), config.token, stream=not (weights or is_local(name))
    )


def run(job: HealingJob, progress: Progress) -> HealingResult:
    """Do the work of a prepared healing; continues an interrupted one of the same options.

    Where several processes were launched, each calls this with the same options; the first of them reads and writes
    the state and the checkpoint.

    Raises:
        InputError: another run holds the output, there is no room for it, or the losses are not finite.
        RuntimeError: the written checkpoint does not compute what was trained; nothing is left looking finished.
    """
    config, folder = job.config, job.converted.folder
    needed = [folder, *(Path(file) for file in config.text)]
    with launched(job.arithmetic.device) as processes:
        if config.batch % processes.count:
            raise InputError(
                f"batch_tokens {config.batch_tokens}: expected a multiple of {processes.count} windows of "
                f"{config.seq_len} tokens, one or more for each process"
            )
        if processes.first:
            with locked_output(config.output_path, folder, overwrite=config.overwrite, needed=needed):
                _run(job, processes, progress)
        elif not processes.shared(False):
            state = processes.shared(None)
            assert state is not None
            _trained(job, state, processes, silent)
        processes.wait()
    return HealingResult(config.output_path, read_recipe(config.output_path))


def _run(job: HealingJob, processes: Processes, progress: Progress) -> None:
    """What the first process does."""
    folder, writer = job.converted.folder, _writer(job)
    processes.shared(writer.moving)
    if writer.moving:
        writer.finish()
        return
    state = writer.state()
    processes.shared(state)
    student, training = _trained(job, state, processes, progress)
    small = [name for name in job.recipe.files if not name.endswith((".safetensors", ".index.json"))]
    writer.copy({name: folder / name for name in small})
    changed = (
        student.stored(job.converted.dtype) if training.best else {}
    )  # where nothing was gained, the very same weights
    for name in writer.tensors:
        writer.write(name, {name: changed[name] if name in changed else job.converted.tensor(name)})
    writer.write_index()
    recipe = replace(_recorded(job, writer, student, training), files=writer.hashes())
    writer.write_text(RECIPE, json.dumps(recipe.to_dict(), indent=2) + "\n")
    writer.finish()


def _writer(job: HealingJob) -> CheckpointWriter:
    """For the same tensors, in the same dtypes and files, as the conversion has."""
    config, recipe = job.config, job.recipe
    hidden = {"token", "overwrite", "output", "converted", "teacher", "text"}
    options = {name: value for name, value in asdict(config).items() if name not in hidden}
    key = {
        "healing": options,
        "files": recipe.files,
        "text": job.text.sha256,
        "dtype": dtype_name(job.arithmetic.dtype),
    }
    tensors = {name: TensorPlan(h.shape, STORED[h.dtype]) for name, h in job.converted.headers.items()}
    shards = into_files(tensors, recipe.options.max_shard_size)
    return CheckpointWriter(config.output_path, tensors, shards, key, overwrite=config.overwrite)


def _trained(job: HealingJob, state: Path, processes: Processes, progress: Progress) -> tuple[Student, Training]:
    """The student as it was at its best, and how it came there."""
    config = job.config
    dtype = processes.shared(job.arithmetic.dtype)
    assert dtype is not None
    arithmetic = Arithmetic(local_device(job.arithmetic.device), dtype)
    teacher = _predictions(job, arithmetic, state, processes, progress)
    model = load(job.converted, torch.float32, torch.device("cpu"), attn_implementation=ATTENTION)
    # what is not trained stays as it is stored, so that it loses nothing
    frozen = torch.float32 if dtype == torch.float32 else job.converted.dtype
    share = RECOMPUTED[config.recompute]
    student = Student(model, TARGETS[job.recipe.options.target], config.train, frozen=frozen, recompute=share)
    model.to(arithmetic.device)  # a GPU never holds all of it in float32
    healer = Healer(config, teacher, student, job.text, arithmetic, state, processes)
    return student, healer.run(progress)


def _predictions(
    job: HealingJob, arithmetic: Arithmetic, state: Path, processes: Processes, progress: Progress
) -> Teacher:
    """The original beside the student, or what it predicts for all windows of an epoch, on disk."""
    config = job.config
    if not config.cache_teacher:
        return Beside(load(job.teacher, arithmetic.dtype, arithmetic.device, attn_implementation=ATTENTION), arithmetic)
    folder = state / "original"
    if processes.first:
        windows = job.text.epoch(config.seq_len, config.seed)
        needed = len(windows) if config.max_steps is None else min(len(windows), config.max_steps * config.batch)
        model = StreamedModel(job.teacher, read_config(job.teacher), arithmetic.dtype, arithmetic.device)
        record(model, [*job.text.held_windows(), *windows[:needed]], folder, progress)
    processes.wait()
    return Recorded(folder, arithmetic.device)


def _recorded(job: HealingJob, writer: CheckpointWriter, student: Student, training: Training) -> Recipe:
    """The record with this healing, once the written checkpoint gives what was trained.

    Raises:
        RuntimeError: it gives something else.
    """
    config, recipe = job.config, job.recipe
    tokens = torch.tensor([recipe.check.probe.tokens])
    found = reloaded_logits(writer.folder, tokens, job.arithmetic.device)
    student.model.float()
    with torch.no_grad():
        expected: Tensor = student.model(tokens.to(job.arithmetic.device), use_cache=False).logits
    difference = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    dtype = job.converted.dtype
    if not difference <= LAYOUT_TOLERANCE[dtype]:
        raise RuntimeError(
            f"{writer.out}: the written checkpoint's logits differ from the trained model's by {difference:.1e} "
            f"(allowed {LAYOUT_TOLERANCE[dtype]:.0e} in {dtype_name(dtype)}); nothing was finished, please report this"
        )
    record = HealingRecord(
        latentfold=version("latentfold"),
        versions={name: version(name) for name in ("torch", "transformers")},
        teacher=public_name(job.teacher.name),
        revision=job.teacher.revision,
        texts=tuple(map(public_name, job.text.sources)),
        sha256=job.text.sha256,
        seq_len=config.seq_len,
        batch_tokens=config.batch * config.seq_len,
        train=config.train,
        rate=training.rate,
        seed=config.seed,
        dtype=dtype_name(job.arithmetic.dtype),
        minutes=None if config.seconds is None else config.seconds / 60,
        curve=tuple(training.curve),
        best=training.best,
    )
    check = replace(recipe.check, probe=probe_of(tokens, found))
    return replace(recipe, check=check, healing=(*recipe.healing, record))
