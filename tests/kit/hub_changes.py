"""Changes of a hub's tables: one that a later release could make, and those of this one undone."""

from __future__ import annotations

import shutil
from pathlib import Path

from sqlalchemy import Connection, text

from adapterhub.hub import migrations
from adapterhub.hub.database import SCHEMA_REVISION

NEXT = f"{int(SCHEMA_REVISION) + 1:04}"
CHANGE = f'''
"""A change of the tables."""
from alembic import op
import sqlalchemy as sa
revision = "{NEXT}"
down_revision = "{SCHEMA_REVISION}"
def upgrade():
    with op.batch_alter_table("audit") as table:
        table.add_column(sa.Column("reason", sa.Text()))
'''


def write_changes(folder: Path) -> Path:
    """Write the changes of this release and the next one to a folder; return it."""
    known = Path(migrations.__path__[0]) / "versions"
    shutil.copytree(known, folder, ignore=shutil.ignore_patterns("__*"))
    (folder / f"r{NEXT}_reason.py").write_text(CHANGE)
    return folder


def make_first(connection: Connection) -> None:
    """Give a hub the tables of the first release."""
    for statement in (
        "DROP TABLE sessions",
        "DROP TABLE renamed",
        "DROP TABLE promises",
        "ALTER TABLE namespaces DROP COLUMN is_disabled",
        "DELETE FROM settings WHERE key LIKE 'highest id of %'",
        "UPDATE alembic_version SET version_num = '0001'",
    ):
        connection.execute(text(statement))
