"""tf.train.Example, the records of TensorFlow Datasets, without TensorFlow."""

import functools
from typing import Any

_DESCRIPTION = """
name: "fnet/tf_example.proto" package: "fnet" syntax: "proto3"
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  field {
    name: "bytes_list" number: 1
    type: TYPE_MESSAGE type_name: ".fnet.BytesList" oneof_index: 0
  }
  field {
    name: "float_list" number: 2
    type: TYPE_MESSAGE type_name: ".fnet.FloatList" oneof_index: 0
  }
  field {
    name: "int64_list" number: 3
    type: TYPE_MESSAGE type_name: ".fnet.Int64List" oneof_index: 0
  }
  oneof_decl { name: "kind" }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: ".fnet.Features.FeatureEntry"
  }
  nested_type {
    name: "FeatureEntry"
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".fnet.Feature" }
    options { map_entry: true }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".fnet.Features" }
}
"""


def parse_example(record: bytes) -> dict[str, list[Any]] | None:
    r"""Parse a tf.train.Example: lists of bytes, float or int by feature name. None if it is none.

    Example:
      >>> parse_example(b"\n\x10\n\x0e\n\x05label\x12\x05\x1a\x03\n\x01\x07")
      {'label': [7]}
    """
    from google.protobuf.message import DecodeError

    try:
        features = example_type().FromString(record).features.feature
    except DecodeError:
        return None
    found = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value) if kind else []
    return found or None


@functools.cache
def example_type() -> Any:
    """Build the message type of tf.train.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_DESCRIPTION, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fnet.Example"))
