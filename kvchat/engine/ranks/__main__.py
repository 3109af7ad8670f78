"""``python -m kvchat.engine.ranks``: one of the processes that have some of a model's heads each."""

from kvchat.process import postpone_full_collections, spin_briefly, use_physical_cores

if __name__ == "__main__":
    postpone_full_collections()
    spin_briefly()
    use_physical_cores()
    from kvchat.engine.ranks.follower import main

    main()
