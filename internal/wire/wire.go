// Package wire turns the contract's types into messages of the plugin protocol and back.
//
// The XToProto functions trust their argument, which comes from our own process. The XFromProto
// functions trust nothing: what they return is within the limits below, or they return an error
// that wraps ErrMalformed and names the field. They keep no part of the message but its byte
// slices, which the result may alias.
package wire

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that ours wraps
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ProtocolVersion is the version of the protocol, as go-plugin negotiates it.
const ProtocolVersion = 1

// PluginName is the one entry of the go-plugin plugin set.
const PluginName = "kvport"

// The cookie by which a plugin knows that a host started it. It is no security measure.
const (
	CookieKey = "KVPORT_PLUGIN"
	// FenceKey names, in a plugin's environment, the descriptors that every process must hold that
	// has the regions from the plugin.
	FenceKey = "KVPORT_FENCE"
	// LifeKey is a mark of this life of the plugin. Processes that it starts inherit it, so that the host knows
	// them for the plugin's when it dies.
	LifeKey     = "KVPORT_LIFE"
	CookieValue = "b1f0e4a6c7d94b0f9b7e6f4a5d3c2810"
)

// The limits of a message. A receiver refuses what exceeds them before it allocates for it.
const (
	MaxMessage   = 16 << 20 // bytes of one message
	MaxConfig    = 4 << 20  // bytes of a connector's config
	MaxName      = 1 << 10  // bytes of a request id, engine id or name
	MaxTicket    = 64 << 10 // bytes of a ticket
	MaxExtra     = 1 << 20  // bytes of Transfer.Extra
	MaxText      = 4 << 10  // bytes of an error's message; longer ones are cut
	MaxTokens    = 1 << 30  // tokens of a request
	MaxBlocks    = 1 << 17  // blocks or keys of one transfer or query
	MaxQueries   = 1 << 14  // queries, transfers or ended requests of one message
	MaxConsumers = 1 << 20  // consumers of a hold
	MaxRegions   = 64       // regions of a rank
	MaxArena     = 1 << 45  // bytes of an arena
	MaxCounters  = 1 << 10  // counters of a board
	MaxWorld     = 1 << 12  // ranks of an engine
	MaxHold      = 24 * time.Hour
)

// ErrMalformed says that a peer's message breaks the protocol.
var ErrMalformed = fmt.Errorf("malformed message: %w", connector.ErrIncompatible)

// malformed reports a broken field.
func malformed(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrMalformed)
}

// Handshake is what both ends give go-plugin.
func Handshake() plugin.HandshakeConfig {
	return plugin.HandshakeConfig{ProtocolVersion: ProtocolVersion, MagicCookieKey: CookieKey, MagicCookieValue: CookieValue}
}

// Plugin is the go-plugin entry of both ends. A plugin sets Service; a host leaves it nil and gets
// the *grpc.ClientConn from Dispense.
type Plugin struct {
	plugin.NetRPCUnsupportedPlugin
	Service kvportv1.PluginServer
}

// GRPCServer implements plugin.GRPCPlugin.
func (p *Plugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error {
	kvportv1.RegisterPluginServer(s, p.Service)
	return nil
}

// GRPCClient implements plugin.GRPCPlugin.
func (p *Plugin) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return conn, nil
}

// ServerOptions are a plugin's limits.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage), grpc.ForceServerCodecV2(Codec())}
}

// DialOptions are a host's limits.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithDefaultCallOptions(
		grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage), grpc.ForceCodecV2(Codec()))}
}

// CallName is the name of a request's call, for logs and errors.
func CallName(m *kvportv1.SessionRequest) string {
	r := m.ProtoReflect()
	call := r.WhichOneof(r.Descriptor().Oneofs().ByName("call"))
	if call == nil {
		return "unknown call"
	}
	return strings.ReplaceAll(string(call.Name()), "_", " ")
}

// Timeout is the timeout_us of a call that runs under ctx: 0 without a deadline, 1 for one that
// has passed.
func Timeout(ctx context.Context) uint64 {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return uint64(max(1, time.Until(deadline).Microseconds()))
}

// WithTimeout is the context of a call that arrived with timeout_us. It can always be cancelled.
func WithTimeout(ctx context.Context, us uint64) (context.Context, context.CancelFunc) {
	if us == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Duration(min(us, math.MaxInt64/1000))*time.Microsecond)
}

// count is n as the wire carries it. What does not fit becomes a number that every receiver
// refuses.
func count(n int) uint32 {
	if n < 0 || n > math.MaxUint32 {
		return math.MaxUint32
	}
	return uint32(n)
}

// list converts one list, refusing a longer one than limit before it allocates.
func list[M, T any](field string, in []M, limit int, convert func(M) (T, error)) ([]T, error) {
	if len(in) > limit {
		return nil, malformed("%s has %d entries, limit %d", field, len(in), limit)
	}
	if len(in) == 0 {
		return nil, nil
	}
	out := make([]T, len(in))
	for i, m := range in {
		v, err := convert(m)
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
		out[i] = v
	}
	return out, nil
}

// each converts one list of our own.
func each[T, M any](in []T, convert func(*T) M) []M {
	if len(in) == 0 {
		return nil
	}
	out := make([]M, len(in))
	for i := range in {
		out[i] = convert(&in[i])
	}
	return out
}

// tokens checks a count of tokens.
func tokens(field string, n uint32) (int, error) {
	if n > MaxTokens {
		return 0, malformed("%s is %d, limit %d", field, n, MaxTokens)
	}
	return int(n), nil
}

// short checks the length of a string or byte slice.
func short[S string | []byte](field string, s S, limit int) error {
	if len(s) > limit {
		return malformed("%s has %d bytes, limit %d", field, len(s), limit)
	}
	return nil
}

// What one message may unfold to. Empty sub-messages take two bytes on the wire and a hundred in
// memory: 4 MiB of them become 212 MiB, so they are counted before anything is decoded.
const (
	maxObjects = 1 << 17 // sub-messages, strings and byte slices in lists
	maxNumbers = 1 << 20 // numbers in lists
	maxDepth   = 16      // nesting; our deepest message has 5 levels
)

// Codec is gRPC's protobuf codec with bounded decoding. Both ends of a connection use it.
func Codec() encoding.CodecV2 { return &codec{encoding.GetCodecV2("proto")} }

type codec struct{ encoding.CodecV2 }

// Unmarshal refuses what breaks the bounds before it decodes the message.
func (c *codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(proto.Message); ok {
		buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer buf.Free()
		if err := CheckSize(buf.ReadOnlyData(), m.ProtoReflect().Descriptor()); err != nil {
			return err
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// CheckSize reports whether an encoded message of type d unfolds within the bounds. Errors wrap
// ErrMalformed.
func CheckSize(b []byte, d protoreflect.MessageDescriptor) error {
	return (&sizer{}).message(b, d, 0)
}

type sizer struct{ objects, numbers int }

func (s *sizer) message(b []byte, d protoreflect.MessageDescriptor, depth int) error {
	if depth > maxDepth {
		return malformed("nested deeper than %d", maxDepth)
	}
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: %w", protowire.ParseError(n), ErrMalformed)
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(number, kind, b)
		if size < 0 {
			return fmt.Errorf("%w: %w", protowire.ParseError(size), ErrMalformed)
		}
		if err := s.field(b[:size], kind, d.Fields().ByNumber(number), depth); err != nil {
			return err
		}
		b = b[size:]
	}
	return nil
}

// field counts one value. f is nil for a field of a newer peer, which is kept as bytes.
func (s *sizer) field(value []byte, kind protowire.Type, f protoreflect.FieldDescriptor, depth int) error {
	if f != nil && f.Message() != nil && kind == protowire.BytesType {
		s.objects++
		inner, _ := protowire.ConsumeBytes(value)
		if err := s.message(inner, f.Message(), depth+1); err != nil {
			return err
		}
	} else {
		s.scalar(value, kind, f)
	}
	if s.objects > maxObjects || s.numbers > maxNumbers {
		return malformed("%d parts and %d numbers, limits %d and %d", s.objects, s.numbers, maxObjects, maxNumbers)
	}
	return nil
}

// scalar counts one value that is no message.
func (s *sizer) scalar(value []byte, kind protowire.Type, f protoreflect.FieldDescriptor) {
	switch {
	case f == nil:
		s.objects++
	case !f.IsList():
	case kind != protowire.BytesType:
		s.numbers++
	case f.Kind() == protoreflect.StringKind || f.Kind() == protoreflect.BytesKind:
		s.objects++
	default: // packed: one byte of each number has no continuation bit
		inner, _ := protowire.ConsumeBytes(value)
		for _, c := range inner {
			if c < 0x80 {
				s.numbers++
			}
		}
	}
}

// Frame says how long a message is as a frame of a ring, and gives the function that appends it to an
// empty slice with room for it.
func Frame(m proto.Message) (size int, fill func(to []byte) ([]byte, error)) {
	return proto.Size(m), func(to []byte) ([]byte, error) {
		return proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(to, m)
	}
}

// FromFrame decodes a frame of a ring, of which m keeps nothing. What it may unfold to need not be
// counted: a frame has 4 KiB. Errors wrap ErrMalformed.
func FromFrame(frame []byte, m proto.Message) error {
	if err := proto.Unmarshal(frame, m); err != nil {
		return fmt.Errorf("frame of %d bytes: %w: %w", len(frame), err, ErrMalformed)
	}
	return nil
}

// PlainValue makes the value of a log line one that people can read: JSON has numbers of nanoseconds for a
// duration and a list of numbers for bytes, which keys and fingerprints are.
func PlainValue(v slog.Value) slog.Value {
	switch v.Kind() {
	case slog.KindDuration:
		return slog.StringValue(v.Duration().String())
	case slog.KindAny:
		return plainAny(v)
	default:
		return v
	}
}

func plainAny(v slog.Value) slog.Value {
	switch x := v.Any().(type) {
	case nil, error, slog.Level, *slog.Source, time.Time: // slog knows them
		return v
	case []byte:
		return slog.StringValue(hex.EncodeToString(x))
	case fmt.Stringer:
		if r := reflect.ValueOf(x); r.Kind() == reflect.Pointer && r.IsNil() {
			return v
		}
		return slog.StringValue(x.String())
	default:
		r := reflect.ValueOf(x)
		if k := r.Kind(); (k == reflect.Array || k == reflect.Slice) && r.Type().Elem().Kind() == reflect.Uint8 {
			return slog.StringValue(fmt.Sprintf("%x", x))
		}
		return v
	}
}
