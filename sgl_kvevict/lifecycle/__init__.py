"""The life of a prefix: what is compressed, when, and with what it was seen; knows no SGLang."""

from sgl_kvevict.lifecycle.manager import PrefixManager

__all__ = ["PrefixManager"]
