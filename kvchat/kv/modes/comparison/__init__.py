"""Methods of other papers, for comparison with kvchat's own modes: one method, one file.

F6 passes them by; ``/mode``, ``--mode``, ``kvchat compare`` and ``kvchat bench`` take their names. Pages are kvchat's
32 tokens, as in FreeKV's comparison, and the choice is a KV head's, so that a group of query heads reads one set. A
budget that is not given is kvchat's (raas: 1,024), the same in all of them and not each paper's.
``page_choice`` is the base of those that choose pages at every token, ``kept`` of those that drop tokens. The latter
choose anew at every prompt: nothing that is stored is lost, so a method of one prompt becomes one of each turn.

InfiniGen (arXiv 2406.19707) is not here: it chooses for a layer with the input of the layer before and with query and
key weights that were skewed by singular vectors of a sample, so it changes the model's weights and needs a hook into
its projections. speculative's ``query=ahead`` is its idea without the skewing.
"""
