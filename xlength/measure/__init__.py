"""``xlength measure``: token lengths of data that is too large to be tokenised twice.

blocks (pieces of the source) -> rows -> counting (in worker processes) -> journal (kept after each
block, so that a killed run goes on) -> lengths.npy and its side file.
"""
