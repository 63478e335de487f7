"""Child processes: how they are started, spoken to, tied to their parent's life, and restarted.

`base` has the protocol of a peer. `child_process` starts children of this program, `child_main` is what runs in them,
and `peer_messages` carries calls and answers between the two. `parent_watchdog` ties programs of others to this
process, `process_output` keeps what they write.
"""
