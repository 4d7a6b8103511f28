"""``xlength report``: what each way of batching buys on given lengths, computed by the very plans
that training uses.

lengths -> strategies (epochs of every sampler) -> measures (rows) -> choice (the recommendation)
-> table, JSON, figures, page.
"""
