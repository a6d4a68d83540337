from .code import user_code as user_code
from .file import execute_module as execute_module
from .outputs import all_named_tensors as all_named_tensors
from .outputs import named_tensors as named_tensors
from .outputs import target_tensors as target_tensors
from .workload import Workload as Workload
from .workload import describe as describe
