"""Sessions that end on the server, disabled users, earlier names, and room kept for uploads."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the tables of sessions, earlier names and promises, and the mark of a disabled user."""

    def words(length: int) -> Any:
        return sa.String(length).with_variant(sa.Text(collation="C"), "postgresql")

    op.add_column(
        "namespaces",
        sa.Column("is_disabled", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "sessions",
        sa.Column("sha256", words(64), primary_key=True),
        sa.Column(
            "token", sa.Integer(), sa.ForeignKey("tokens.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("expires", words(20), nullable=False),
    )
    op.create_index("ix_sessions_token", "sessions", ["token"])
    op.create_table(
        "renamed",
        sa.Column("type", words(8), primary_key=True),
        sa.Column("folded", words(200), primary_key=True),
        sa.Column(
            "repository",
            sa.Integer(),
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            nullable=False,
        ),
    )
    op.create_index("ix_renamed_repository", "renamed", ["repository"])
    op.create_table(
        "promises",
        sa.Column(
            "repository",
            sa.Integer(),
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("sha256", words(64), primary_key=True),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("expires", words(20), nullable=False),
    )
