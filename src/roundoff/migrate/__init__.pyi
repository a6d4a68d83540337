from .migrating import SOURCES as SOURCES
from .migrating import TARGETS as TARGETS
from .migrating import check_direction as check_direction
from .migrating import migrate_script as migrate_script
from .result import Migration as Migration
from .result import Remark as Remark
