"""The flags of TensorRT-LLM's quantize.py that are no options of `plansmith quantize`."""

from __future__ import annotations

from .legacy import Legacy

_ONE_DEVICE = Legacy(
    True,
    "calibration runs on one device, and an engine does too, so a checkpoint is not split; leave it out",
    ("1",),
)
_MEDUSA = Legacy(
    True, "Medusa heads are not supported; leave it out, and build with --draft for speculation", ()
)

FLAGS: dict[str, Legacy] = {
    "--tp-size": _ONE_DEVICE,
    "--pp-size": _ONE_DEVICE,
    "--cp-size": _ONE_DEVICE,
    "--calib-tp-size": _ONE_DEVICE,
    "--calib-pp-size": _ONE_DEVICE,
    "--device-map": Legacy(
        True, "the model is loaded onto --device as a whole", ("auto", "cpu", "sequential")
    ),
    "--export-format": Legacy(
        True,
        "the output is the unified Hugging Face form (hf), which plansmith build reads; ModelOpt drops the other one",
        ("hf",),
    ),
    "--tokenizer-max-seq-length": Legacy(True, "samples are packed to --calib-length, nothing is cut off"),
    "--nemo-ckpt-path": Legacy(
        True, "NeMo checkpoints are not read; convert it to a Hugging Face directory", ()
    ),
    "--decoder-type": Legacy(True, "it goes with NeMo checkpoints; the family is read from config.json"),
    "--num-medusa-heads": _MEDUSA,
    "--num-medusa-layers": _MEDUSA,
    "--max-draft-len": _MEDUSA,
    "--medusa-hidden-act": _MEDUSA,
    "--medusa-model-dir": _MEDUSA,
    "--quant-medusa-head": Legacy(False, _MEDUSA.note, ()),
    "--trust-remote-code": Legacy(False, "no code of a checkpoint is run; leave it out", ()),
}
