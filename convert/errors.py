"""The one exception users are meant to see."""


class InputError(ValueError):
    """Something the user gave cannot be worked with; nothing has been written.

    The message is a single line that says what was expected, what was found and what to do. Options are named as the
    functions have them, at the start with their value (`kv_rank 0: expected ...`) or where they are to be given
    (`pass overwrite`); the command line puts its own spelling there, prints the line without a traceback and exits
    with status 2.
    """
