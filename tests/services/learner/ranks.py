"""Under torchrun: some updates of the tiny model by all ranks together; rank 0 writes what came of them.

python -m torch.distributed.run --nproc-per-node 2 tests/services/learner/ranks.py MODEL FOLDER SETTINGS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from services.compute.checkpoint import Checkpoints
from services.learner.crew import Crew
from services.learner.rank import follow
from services.learner.trainer import load_trainer
from shared.config import Checkpoint
from tests.services.conftest import make_config, make_group


def main() -> None:
    model, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    crew = Crew.join()
    if crew.rank > 0:
        follow(crew)
        crew.leave()
        return
    checkpoint = settings.pop("checkpoint", None)
    seeds = settings.pop("seeds")
    config = make_config(model, **settings)
    reductions, reduce = 0, dist.reduce_scatter_single

    def counted(*arguments, **others):
        nonlocal reductions
        reductions += 1
        return reduce(*arguments, **others)

    dist.reduce_scatter_single = counted
    trainer = load_trainer(config, 10, None if checkpoint is None else Path(checkpoint), crew)
    steps = []
    for seed in seeds:
        groups = [make_group(10 * seed + i) for i in range(3)]
        steps.append(trainer.step(groups))
        weights = {name: torch.empty(shape) for name, shape in trainer.backend.shapes.items()}
        trainer.backend.write_snapshot(weights)
        trainer.backend.use_snapshot(None)
        scores = trainer.backend.score(list(range(20)))
        steps[-1] |= {"scores": scores.tolist(), "reductions": reductions}
        reductions = 0
    saved = Checkpoints(folder / "checkpoints", Checkpoint()).save(trainer, lineage=0)
    parts = [p.to_local() if crew.size > 1 else p for p in trainer.backend.parameters.values()]
    torch.save(weights, folder / "weights.pt")
    (folder / "steps.json").write_text(
        json.dumps(
            {
                "steps": steps,
                "checkpoint": str(saved),
                "version": trainer.version,
                "own_weights": sum(part.numel() for part in parts),
            }
        )
    )
    crew.leave()


if __name__ == "__main__":
    main()
