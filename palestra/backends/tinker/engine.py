"""SkyRL's engine, which its server starts as a process of its own. Runs in the environment `tinker`; see `serving.py`."""

from palestra.backends.tinker.serving import bridge_typed_dict

if __name__ == "__main__":
    bridge_typed_dict()
    from skyrl.tinker import engine

    engine.main()
