"""The life of a prefix: what is compressed, when, and from which observations. Imports no SGLang."""
