"""The process group and its topology, failures and votes shared by all ranks, random generators.

The modules from the ground up: ``process_group`` joins the group, ``abort`` ends it after an
error, ``topology`` knows the ranks and the device, ``failures`` raises an error of one rank on all,
``process_control`` runs code on some ranks only, ``votes`` makes ranks act at the same step, and
``rng`` seeds and synchronizes generators.
"""
