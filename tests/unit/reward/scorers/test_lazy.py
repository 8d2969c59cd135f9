from __future__ import annotations

import pkgutil
import subprocess
import sys

import unirl.reward.scorers

HEAVY = (
    "torch", "sklearn", "scipy", "PIL", "rapidocr", "onnxruntime", "cv2", "transformers", "diffusers",
    "sympy", "math_verify", "jsonschema",
)  # fmt: skip
DEFER = "import sys\nfrom unirl.config.lazy import defer_heavy_imports\ndefer_heavy_imports()\n"
# A deferred package is known, its modules are not.
LOADED = f"print([name for name in {HEAVY} if any(known.startswith(name + '.') for known in sys.modules)])"


def test_importing_every_scorer_loads_no_heavy_library():
    modules = [f"unirl.reward.scorers.{found.name}" for found in pkgutil.iter_modules(unirl.reward.scorers.__path__)]
    assert len(modules) >= 5
    program = f"{DEFER}import {', '.join(modules)}\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_constructing_every_scorer_loads_no_heavy_library():
    program = (
        f"{DEFER}"
        "from unirl.reward.scorers import aesthetic, arithmetic, clap, clip_score, digits, geneval2, hps, hps_v3, "
        "edit_reward, image_reward, jpeg, json_valid, math_answer, ocr, pick_score, shapes, video_align, vqa_score\n"
        "made = [digits.DigitJudge(), digits.DigitDiversity(), jpeg.JpegCompressibility(), "
        "ocr.OcrEditSimilarity(), shapes.ColourShape(), math_answer.MathAnswer(), json_valid.JsonValid(), "
        "arithmetic.Arithmetic(), pick_score.PickScore(), pick_score.VideoPickScore(), hps.HPSv2(), "
        "clip_score.CLIPScore(), aesthetic.LaionAesthetic(), image_reward.ImageReward(), clap.CLAPScore(), "
        "geneval2.GenEval2(), vqa_score.VQAScore(), hps_v3.HPSv3(), video_align.VideoAlign(), "
        "edit_reward.EditReward()]\n"
        f"{LOADED}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
