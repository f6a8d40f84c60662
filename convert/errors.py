"""The one exception users are meant to see."""


class InputError(ValueError):
    """Something the user gave cannot be worked with; nothing has been written.

    The message is a single line that says what was expected, what was found and what to do.
    The command line prints it without a traceback and exits with status 2.
    """
