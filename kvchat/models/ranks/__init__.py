"""A model whose heads are split over several processes, the ranks: each has a GPU and its own part of every layer."""
