"""`python -m narrowgauge`: the same as the `narrowgauge` command."""

from narrowgauge.cli.main import run

if __name__ == "__main__":
    run()
