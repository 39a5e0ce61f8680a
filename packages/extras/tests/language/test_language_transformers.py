"""Models of transformers: packed documents, chunked losses, adapters; in `nox -s huggingface`."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch.utils.data import DataLoader

from stratagem import Trainer
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_extras.language import (
    LanguageModule,
    MixedDataset,
    PackedDataset,
    PackedStream,
    StreamLoader,
    check_packing,
    chunk_loss,
    count_labels,
    join_documents,
    pad_documents,
)

transformers = pytest.importorskip("transformers", reason="`nox -s huggingface` has it")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES, **HEADS}),
    "llama, tied": ("LlamaConfig", {**SIZES, **HEADS, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SIZES, **HEADS, "head_dim": 8}),
    "gemma 3": ("Gemma3TextConfig", {**SIZES, **HEADS, "head_dim": 8, "sliding_window": 4}),
    "mistral": ("MistralConfig", {**SIZES, **HEADS, "sliding_window": 4}),
    "gpt2": ("GPT2Config", {**NO_DROPOUT, "n_embd": 32, "n_layer": 2, "vocab_size": 96}),
}


def made(name: str, **options: Any) -> Any:
    kind, sizes = DECODERS[name]
    transformers.set_seed(1)
    config = getattr(transformers, kind)(**sizes, **options, pad_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 12, (24,), generator=draw).tolist()
    return [torch.randint(0, 96, (length,), generator=draw).tolist() for length in lengths]


@pytest.mark.parametrize("name", DECODERS)
def test_packed_rows_have_the_loss_of_single_documents(name: str) -> None:
    model = made(name).double().eval()
    check_packing(model)
    packed = next(iter(DataLoader(PackedDataset(documents(), 16), 100)))
    loss = model(**packed).loss.detach()
    total, count = 0.0, 0
    for document in documents():
        ids = torch.tensor([document])
        total += float(model(input_ids=ids, labels=ids).loss.detach()) * (len(document) - 1)
        count += len(document) - 1
    assert float(loss) == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("name", DECODERS)
def test_padded_joined_and_packed_documents_have_the_gradients_of_single_ones(name: str) -> None:
    model = made(name).double()
    model.config.use_cache = False
    count = sum(len(document) - 1 for document in documents())

    def gradients(*batches: Any) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = model(**batch).loss * int(count_labels(batch["labels"])) / count
            loss.backward()
            total += float(loss.detach())
        return total, [weight.grad.clone() for weight in model.parameters()]

    alone = [pad_documents([document], multiple=1) for document in documents()]
    loss, expected = gradients(*alone)
    for batch in (
        pad_documents(documents(), multiple=8),
        join_documents(documents()),
        next(iter(DataLoader(PackedDataset(documents(), 16), 100))),
    ):
        own_loss, own = gradients(batch)
        assert own_loss == pytest.approx(loss, rel=1e-6)
        for one, other in zip(own, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_stream_of_datasets_is_a_source() -> None:
    datasets = pytest.importorskip("datasets", reason="`nox -s huggingface` has it")
    rows = [{"input_ids": document} for document in documents()]

    def loader() -> StreamLoader:
        texts = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        mixed = MixedDataset({"texts": (texts, 0.8), "other": (documents(), 0.2)}, repeat=True)
        return StreamLoader(PackedStream(mixed, 16), 2)

    first, again = loader(), loader()
    reading = iter(first)
    for _ in range(20):  # more than all documents
        next(reading)
    again.load_state_dict(first.state_dict())
    for own, expected, _ in zip(again, reading, range(20), strict=False):
        assert torch.equal(own["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("packed", [True, False])
def test_a_mask_or_a_cache_that_joins_documents_is_refused(packed: bool) -> None:
    batch = next(iter(DataLoader(PackedDataset(documents(), 16), 4)))
    module = LanguageModule(made("llama"), packed=packed)
    if not packed:
        with pytest.raises(UserCodeError, match=r"config\.use_cache is True, with which models"):
            module.validation_step(batch, 0)
        model: Any = module.model
        model.config.use_cache = False
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    with pytest.raises(UserCodeError, match=r"has an attention_mask, with which models"):
        module.validation_step(masked, 0)


def test_positions_of_padded_rows_are_no_documents() -> None:
    module = LanguageModule(made("llama"))
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2]])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions}
    module._check_documents(batch)
    assert module._packed is False


def test_attention_that_does_not_follow_positions_is_refused() -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=96)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(ConfigurationError, match="documents in a row of BloomForCausalLM see"):
        check_packing(model)


def test_an_encoder_decoder_is_no_model_of_packed_rows() -> None:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=16, vocab_size=8))
    with pytest.raises(
        ConfigurationError, match="T5ForConditionalGeneration cannot be called with"
    ):
        check_packing(model)


@pytest.mark.parametrize("name", DECODERS)
def test_chunked_losses_change_no_number(name: str) -> None:
    plain, chunked = made(name), made(name)
    chunk_loss(chunked, 7)
    batch = next(iter(DataLoader(PackedDataset(documents(), 16), 4)))
    losses = [model(**batch, use_cache=False).loss for model in (plain, chunked)]
    for loss in losses:
        loss.backward()
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-6)
    for own, expected in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_an_adapter_of_the_last_layer_is_refused_in_both_orders() -> None:
    peft = pytest.importorskip("peft", reason="`nox -s huggingface` has it")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from peft, of transformers' names
        adapted = peft.get_peft_model(made("llama"), config)
        with pytest.raises(
            ConfigurationError, match=r"has an adapter of PEFT \(Linear\): expected"
        ):
            chunk_loss(adapted)
        plain = made("llama")
        chunk_loss(plain)
        late = peft.get_peft_model(plain, config)
    batch = next(iter(DataLoader(PackedDataset(documents(), 16), 4)))
    with pytest.raises(UserCodeError, match="the last layer got an adapter after chunk_loss"):
        late(**batch)


def test_a_softcap_after_the_last_layer_is_refused() -> None:
    config = transformers.Gemma2Config(**SIZES, **HEADS, head_dim=8, final_logit_softcapping=30.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    chunk_loss(model)
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="Gemma2ForCausalLM changes its logits"):
        model(input_ids=ids, labels=ids)


def test_adapters_train_packed_with_a_chunked_loss() -> None:
    """A fine-tuning script: packed documents, LoRA, accumulation, a head that is never whole."""
    peft = pytest.importorskip("peft", reason="`nox -s huggingface` has it")
    weights = []
    for chunk in (None, 5):
        model = made("llama")
        check_packing(model)
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from peft, of transformers' names
            adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        if chunk:
            chunk_loss(adapted, chunk)
        module = LanguageModule(adapted, partial(torch.optim.AdamW, lr=1e-2))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader(PackedDataset(documents(), 16), 2))
        trained = [p for p in adapted.parameters() if p.requires_grad]
        weights.append(torch.cat([p.detach().flatten() for p in trained]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


SCRIPT = Path(__file__).parents[1] / "scripts" / "language_strategies.py"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_3", "mesh"])
def test_a_fine_tuning_has_the_losses_of_one_process(
    strategy: str, tmp_path: Path, one_process: list[list[float]]
) -> None:
    """Packed rows, accumulation, clipping, a chunked loss; all weights, then adapters."""
    run_file(SCRIPT, "out.json", strategy, "2", "5", folder=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    for own, expected in zip(found, one_process, strict=True):
        assert own == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses of one process, whose logits are whole."""
    folder = tmp_path_factory.mktemp("one")
    run_file(SCRIPT, "out.json", "single_device", "1", "0", folder=folder)
    losses: list[list[float]] = json.loads((folder / "out.json").read_text())
    return losses
