"""The DSpark draft: what one looks like on disk, what it computes, and whether it fits a target.

Not here: drafting inside the engine (`rollout.plugin.draft`, `rollout.plugin.proposer`), which is tested against
`inkling_rl.draft.reference`. `shape` and `checkpoint` import neither torch nor a vendor, so that a draft that does not
fit is refused before an engine starts.
"""
