"""The messages of KServe's inference protocol, version 2, as Triton's clients send them: classes made at run time.

The numbers of the fields are those that KServe and Triton publish (open-inference-protocol's grpc_predict_v2.proto and
Triton's grpc_service.proto). A map is on the wire a list of names and values, and is one here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "inference.GRPCInferenceService"
_TENSOR = "name:string=1 datatype:string=2 shape:int64*=3 parameters:Parameter*=4 contents:Contents=5"
_METADATA = "name:string=1 datatype:string=2 shape:int64*=3"
# Message -> its fields: name, type (* repeated, | one of a choice) and number.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:bool=1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:bool=1",
    "ModelReadyRequest": "name:string=1 version:string=2",
    "ModelReadyResponse": "ready:bool=1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:string=1 version:string=2 extensions:string*=3",
    "ModelMetadataRequest": "name:string=1 version:string=2",
    "ModelMetadataResponse": (
        "name:string=1 versions:string*=2 platform:string=3 inputs:TensorMetadata*=4 outputs:TensorMetadata*=5"
    ),
    "TensorMetadata": _METADATA,
    "Parameter": "key:string=1 value:InferParameter=2",
    "InferParameter": "bool:bool|=1 int64:int64|=2 string:string|=3 double:double|=4 uint64:uint64|=5",
    "Contents": (
        "bool:bool*=1 int:int32*=2 int64:int64*=3 uint:uint32*=4 uint64:uint64*=5 fp32:float*=6 fp64:double*=7"
        " bytes:bytes*=8"
    ),
    "InputTensor": _TENSOR,
    "OutputTensor": _TENSOR,
    "RequestedOutput": "name:string=1 parameters:Parameter*=2",
    "ModelInferRequest": (
        "model_name:string=1 model_version:string=2 id:string=3 parameters:Parameter*=4 inputs:InputTensor*=5"
        " outputs:RequestedOutput*=6 raw_input_contents:bytes*=7"
    ),
    "ModelInferResponse": (
        "model_name:string=1 model_version:string=2 id:string=3 parameters:Parameter*=4 outputs:OutputTensor*=5"
        " raw_output_contents:bytes*=6"
    ),
    "ModelStreamInferResponse": "error_message:string=1 infer_response:ModelInferResponse=2",
}


def _classes() -> dict[str, Any]:
    """The class of each message, in a pool of its own: a client in this process may have the same names."""
    file = FileDescriptorProto(name="kserve_v2.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            title, _, rest = field.partition(":")
            kind, _, number = rest.partition("=")
            made = message.field.add(name=title, number=int(number))
            made.label = made.LABEL_REPEATED if kind.endswith("*") else made.LABEL_OPTIONAL
            if kind.endswith("|"):
                if not message.oneof_decl:
                    message.oneof_decl.add(name="choice")
                made.oneof_index = 0
            kind = kind.rstrip("*|")
            if kind in _MESSAGES:
                made.type, made.type_name = made.TYPE_MESSAGE, f".inference.{kind}"
            else:
                made.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES}


CLASSES = _classes()
