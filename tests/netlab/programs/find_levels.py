"""Prints, on the first rank, the levels that the ranks find."""

import json
import os

from zeromesh.launch.ranks import join_ranks
from zeromesh.measure.levels.find import find_levels


def main() -> None:
    with join_ranks({"node": int(os.environ["WORLD_SIZE"])}, None) as ranks:
        found = find_levels(ranks)
        if ranks.rank == 0:
            print(json.dumps([dict(found.mesh), dict(found.sources)]))


main()
