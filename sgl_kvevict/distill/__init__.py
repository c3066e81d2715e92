"""What is learned of a model before it is served: scores of cached tokens, and statistics of its keys and values.

Scores are linear maps from cached keys and values to the logarithm of the attention that later queries pay. They are
learned from texts that the model repeats. Rows of few bits are written and read with the statistics.
"""
