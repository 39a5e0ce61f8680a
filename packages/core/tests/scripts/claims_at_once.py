# Run by test_claims.py: four processes want each name at the same moment. Every other name is that
# of a process that was killed.
import multiprocessing
import sys
from pathlib import Path

import locks

from stratagem.storage.claims import claim
from stratagem.storage.owner import Owner

ROUNDS, PROCESSES = 100, 4


def want(folder, meet, wins):
    for number in range(ROUNDS):
        meet.wait(30)
        claimed = claim(folder / f"{number}.ckpt")
        meet.wait(30)  # nobody gives it back before all have asked
        if claimed is not None:
            wins.put(number)
            if number % 3:
                claimed.release()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    ended = context.Process()
    ended.start()
    here = Owner.this()
    dead = Owner(here.boot, here.namespace, ended.pid, 1)
    ended.join()
    for number in range(0, ROUNDS, 2):
        (folder / f".{number}.ckpt.claim").write_text(f"{dead} {number:016x}")
    meet, wins = context.Barrier(PROCESSES), context.SimpleQueue()
    processes = [context.Process(target=want, args=(folder, meet, wins)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    won = []
    for process in processes:
        process.join()
        assert process.exitcode == 0
    while not wins.empty():
        won.append(wins.get())
    twice = len(won) - len(set(won))
    print(f"{locks.KIND}: twice {twice}, nobody's {ROUNDS - len(set(won))}")
