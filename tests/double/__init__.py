"""A double of NeMo-RL, for tests where there is none: the names of the contract, with tiny behaviour.

Written from the contract's sentences, and not from NeMo-RL's code. `behaviours` says what of them
holds; that is run against NeMo-RL and against the double alike. `stamp.txt` is of the contract that
both were last held against.
"""
