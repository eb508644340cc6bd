"""Linear attention as a fast-weight memory: the write and the read as two free choices."""

__version__ = "0.1.0"
