"""The layouts that checkpoints are saved and loaded under."""

STRATEGIES = (
    "node=0,cluster=0",
    "node=1,cluster=0",
    "node=2,cluster=2",
    "node=3,cluster=3",
    "node=3,cluster=0",
    "node=3,cluster=1",
    "node=3,cluster=3k",
    "node=0,cluster=3",
)
