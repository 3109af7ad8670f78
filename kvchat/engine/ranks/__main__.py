"""``python -m kvchat.engine.ranks``: a process that holds some of a model's heads."""

from kvchat.process import postpone_full_collections, spin_briefly, use_physical_cores

if __name__ == "__main__":
    postpone_full_collections()
    spin_briefly()
    use_physical_cores()
    from kvchat.engine.ranks.follower import main

    main()
