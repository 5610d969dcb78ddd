"""Training of DSpark drafts against a frozen target, and what a trained one is worth.

Order of reading: `model` (the draft, many blocks at once), `target`, `completions`, `losses`, `loop`, `files`,
`measure`, `run`. Drafting inside the engine is `rollout.plugin.draft`; what a draft computes is defined by
`inkling_rl.draft.reference`.
"""
