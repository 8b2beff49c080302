"""What several commands say of the same option."""

TASK_HELP = (
    "digits, digits-linear, mnist, text, or your own: package.module:function or path/to/file.py:function."
)
