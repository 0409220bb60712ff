"""The tables of the first release."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: a new hub is created with these tables."""
