# Run by test_durability.py.
from pathlib import Path
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem_testing.durability.saver import NAME, Model, Subject
from stratagem_testing.durability.scenarios import Row, Scenarios

scenarios, subject = Scenarios(Path(), {}, 0), Subject("single_file", True, 0.1)
model, row, folder = Model(0.1), Row(subject, "kill -9"), Path("saved")
for number in (2, 3, 4):
    model.train(number)
    checkpoint = model.checkpoint(number, shards=False)
    SingleFileCheckpointIO().save_checkpoint(checkpoint, folder / NAME)
    scenarios._judge(row, folder, [{"begun": 4}], 2)
    print(row.new, row.old, row.wrong)
