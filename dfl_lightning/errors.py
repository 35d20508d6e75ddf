"""The one exception for mistakes that the person at the keyboard can mend."""


class UserError(Exception):
    """A mistake in a config, in data or in a checkpoint.

    The message is one sentence that says what was given, what is allowed and what to do. The command line prints it
    without a traceback and exits with a status that is not 0.
    """
