"""Sessions that end on the server, and users who are disabled."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table of sessions, and the mark of a disabled user."""
    words = sa.String(64).with_variant(sa.Text(collation="C"), "postgresql")
    time = sa.String(20).with_variant(sa.Text(collation="C"), "postgresql")
    op.add_column(
        "namespaces",
        sa.Column("is_disabled", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "sessions",
        sa.Column("sha256", words, primary_key=True),
        sa.Column(
            "token", sa.Integer(), sa.ForeignKey("tokens.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("expires", time, nullable=False),
    )
    op.create_index("ix_sessions_token", "sessions", ["token"])
