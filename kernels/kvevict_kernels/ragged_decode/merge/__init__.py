"""Second launch of ``ragged_decode``."""
