from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from question import QUESTION, leave

config = yaml.safe_load(Path(package_dir, "config", "mini.yaml").read_text())
model = LitellmModel(
    model_name="openai/policy", cost_tracking="ignore_errors", **config.get("model", {})
)
agent = DefaultAgent(model, LocalEnvironment(), **config["agent"])
leave(agent.run(QUESTION)["submission"])
