"""A change of a hub's tables that a later release could make."""

from __future__ import annotations

from pathlib import Path

from adapterhub.hub import migrations

CHANGE = '''
"""A change of the tables."""
from alembic import op
import sqlalchemy as sa
revision = "0002"
down_revision = "0001"
def upgrade():
    with op.batch_alter_table("audit") as table:
        table.add_column(sa.Column("reason", sa.Text()))
'''


def write_changes(folder: Path) -> Path:
    """Write the changes of this release and the next one to a folder; return it."""
    folder.mkdir()
    first = "r0001_first.py"
    known = Path(migrations.__path__[0]) / "versions" / first
    (folder / first).write_text(known.read_text())
    (folder / "r0002_reason.py").write_text(CHANGE)
    return folder
