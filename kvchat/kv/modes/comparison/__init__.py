"""Methods of other papers, for comparison with kvchat's own modes: one method, one file.

F6 skips them; ``/mode``, ``--mode``, ``kvchat compare`` and ``kvchat bench`` accept their names. Pages have kvchat's 32
tokens, as in FreeKV's comparison, and each KV head chooses for its group of query heads. The default budget is kvchat's
(raas: 1,024), not each paper's. ``page_choice`` is the base of methods that choose pages for every token, ``kept`` of
methods that drop tokens. The latter choose again at every prompt, because stored tokens are never lost.

InfiniGen (arXiv 2406.19707) is missing. It chooses for a layer by the input of the layer before, and by query and key
weights skewed with singular vectors of a sample, so it changes the model's weights and needs a hook into its
projections. speculative's ``query=ahead`` is the same idea without the skewing.
"""
