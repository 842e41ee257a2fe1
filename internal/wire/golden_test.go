package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"math/bits"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// golden is what protocol 1 has at present, frozen what it had as protocol 1.0. The latter is never written again.
const (
	golden    = "../../proto/kvport/v1/v1.binpb"
	frozen    = "../../proto/kvport/v1/v1.0.binpb"
	frozenSum = "2e6eb4160ad253e7b54d428b26a0654f80ea36ca9d478ea54cb64a37f0cbeaab" // SHA-256
)

var update = flag.Bool("update", false, "write the golden descriptor again; breaking changes are still refused")

// Protocol 1 is frozen: fields, values and methods are only added. The golden descriptor is what it
// was frozen at.
func TestGoldenDescriptor(t *testing.T) {
	data, err := os.ReadFile(golden)
	require.NoError(t, err)
	var set, now descriptorpb.FileDescriptorSet
	require.NoError(t, proto.Unmarshal(data, &set))
	for _, file := range []protoreflect.FileDescriptor{kvportv1.File_kvport_v1_plugin_proto, kvportv1.File_kvport_v1_agent_proto} {
		now.File = append(now.File, protodesc.ToFileDescriptorProto(file))
	}
	require.Len(t, set.File, len(now.File))
	for i, current := range now.File {
		require.Equal(t, current.GetName(), set.File[i].GetName())
		require.Empty(t, breaks(set.File[i], current), "protocol 1 would break")
		if !*update {
			require.Empty(t, breaks(current, set.File[i]), "what was added is not in the golden descriptor: go test ./internal/wire -run Golden -update")
		}
	}
	if *update {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(&now)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(golden, data, 0o644))
	}
}

// TestFrozen: the plugin's part of protocol 1 has all that protocol 1.0 has, under the same names and numbers (rule PROTO-01).
func TestFrozen(t *testing.T) {
	data, err := os.ReadFile(frozen)
	require.NoError(t, err)
	sum := sha256.Sum256(data)
	require.Equal(t, frozenSum, hex.EncodeToString(sum[:]), "protocol 1.0 is frozen: restore the file")
	var set descriptorpb.FileDescriptorSet
	require.NoError(t, proto.Unmarshal(data, &set))
	require.Len(t, set.File, 1)
	require.Greater(t, len(flatten(set.File[0])), 200)
	require.Empty(t, breaks(set.File[0], protodesc.ToFileDescriptorProto(kvportv1.File_kvport_v1_plugin_proto)), "protocol 1.0 would break")
}

// breaks lists which parts of before are missing or different in after.
func breaks(before, after *descriptorpb.FileDescriptorProto) []string {
	have := flatten(after)
	var lost []string
	for name, what := range flatten(before) {
		if have[name] != what {
			lost = append(lost, name+" was "+what+", is "+have[name])
		}
	}
	return lost
}

// flatten gives every field, enum value and method by its full name and number.
func flatten(f *descriptorpb.FileDescriptorProto) map[string]string {
	out := map[string]string{}
	for _, m := range f.MessageType {
		out[m.GetName()] = "message"
		for _, field := range m.Field {
			out[m.GetName()+"."+field.GetName()] = strings.Join([]string{
				field.GetLabel().String(), field.GetType().String(), field.GetTypeName(),
				strconv.Itoa(int(field.GetNumber())), field.GetJsonName(), oneof(m, field),
			}, " ")
		}
	}
	for _, e := range f.EnumType {
		for _, v := range e.Value {
			out[e.GetName()+"."+v.GetName()] = "value " + strconv.Itoa(int(v.GetNumber()))
		}
	}
	for _, s := range f.Service {
		for _, m := range s.Method {
			out[s.GetName()+"."+m.GetName()] = m.String()
		}
	}
	return out
}

// oneof is the name of the oneof that a field is in; empty if it is in none.
func oneof(m *descriptorpb.DescriptorProto, field *descriptorpb.FieldDescriptorProto) string {
	if field.OneofIndex == nil {
		return ""
	}
	return m.GetOneofDecl()[field.GetOneofIndex()].GetName()
}

func TestBreaksAreSeen(t *testing.T) {
	current := protodesc.ToFileDescriptorProto(kvportv1.File_kvport_v1_plugin_proto)
	for name, change := range map[string]func(*descriptorpb.FileDescriptorProto){
		"field removed": func(f *descriptorpb.FileDescriptorProto) { f.MessageType[0].Field = f.MessageType[0].Field[1:] },
		"field renumbered": func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType[0].Field[0].Number = new(int32(30))
		},
		"type changed": func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType[0].Field[0].Type = descriptorpb.FieldDescriptorProto_TYPE_BYTES.Enum()
		},
		"field moved into a oneof": func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType[0].OneofDecl = []*descriptorpb.OneofDescriptorProto{{Name: new("one")}}
			f.MessageType[0].Field[0].OneofIndex = new(int32(0))
		},
		"field made repeated": func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType[0].Field[0].Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
		},
		"value removed":  func(f *descriptorpb.FileDescriptorProto) { f.EnumType[0].Value = f.EnumType[0].Value[:1] },
		"method removed": func(f *descriptorpb.FileDescriptorProto) { f.Service[0].Method = nil },
	} {
		changed := proto.Clone(current).(*descriptorpb.FileDescriptorProto)
		change(changed)
		require.NotEmpty(t, breaks(current, changed), name)
	}
	added := proto.Clone(current).(*descriptorpb.FileDescriptorProto)
	added.MessageType[0].Field = append(added.MessageType[0].Field, &descriptorpb.FieldDescriptorProto{Name: new("new"), Number: new(int32(40))})
	require.Empty(t, breaks(current, added))
}

// Rule CAP-01: value n of the enum is bit n-1, under the same name.
func TestEnumIsCapabilityBit(t *testing.T) {
	var all connector.Capability
	for number, name := range kvportv1.Capability_name {
		if number == 0 {
			continue
		}
		bit := connector.Capability(1) << (number - 1)
		require.Equal(t, strings.ToLower(strings.TrimPrefix(name, "CAPABILITY_")), bit.String())
		all |= bit
	}
	require.Len(t, connector.Powers(), bits.OnesCount64(uint64(all)))
	require.NotContains(t, all.String(), "bit")
	require.Contains(t, (all + 1).String(), "bit", "a bit of package connector has no enum value")
}

// The other enums carry the contract's own numbers.
func TestEnumsAreContractNumbers(t *testing.T) {
	require.EqualValues(t, connector.RoleProducer, kvportv1.Role_ROLE_PRODUCER)
	require.EqualValues(t, connector.RoleConsumer, kvportv1.Role_ROLE_CONSUMER)
	require.EqualValues(t, connector.RoleBoth, kvportv1.Role_ROLE_BOTH)
	require.EqualValues(t, connector.ScopeEngine, kvportv1.Scope_SCOPE_ENGINE)
	require.EqualValues(t, connector.ScopeNode, kvportv1.Scope_SCOPE_NODE)
	require.EqualValues(t, connector.ScopeShared, kvportv1.Scope_SCOPE_SHARED)
	require.EqualValues(t, connector.PolicyAll, kvportv1.Policy_POLICY_ALL)
	require.EqualValues(t, connector.PolicyTrailing, kvportv1.Policy_POLICY_TRAILING)
	require.EqualValues(t, connector.ReasonStop, kvportv1.Reason_REASON_STOP)
	require.EqualValues(t, connector.ReasonLength, kvportv1.Reason_REASON_LENGTH)
	require.EqualValues(t, connector.ReasonAbort, kvportv1.Reason_REASON_ABORT)
	require.EqualValues(t, connector.ReasonError, kvportv1.Reason_REASON_ERROR)
	require.EqualValues(t, connector.Counter, kvportv1.StatKind_STAT_KIND_COUNTER)
	require.EqualValues(t, connector.Gauge, kvportv1.StatKind_STAT_KIND_GAUGE)
	require.EqualValues(t, connector.BlocksStored, kvportv1.BlockEventKind_BLOCK_EVENT_KIND_STORED)
	require.EqualValues(t, connector.BlocksRemoved, kvportv1.BlockEventKind_BLOCK_EVENT_KIND_REMOVED)
	require.EqualValues(t, connector.BlocksCleared, kvportv1.BlockEventKind_BLOCK_EVENT_KIND_CLEARED)
}
