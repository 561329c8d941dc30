"""The one error that means: the user can mend this."""


class UserError(ValueError):
    """Wrong input. The message names the field or file, the rule and what to do; commands print it and exit with 2."""
