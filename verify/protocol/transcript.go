// Package protocol holds golden transcripts of the plugin protocol: what a host and a plugin say to each other,
// message by message, as files in testdata. Plugins in any language are tested against the host's side of
// them, and the host against the plugin's. docs/protocol.md describes the format.
package protocol

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Line is one line of a transcript: a JSON object that says one thing.
type Line struct {
	// Note is a sentence for readers.
	Note string `json:"note,omitempty"`

	// Start is the environment in which the plugin is started, with @SOCKETS@ and @CERTIFICATE@ in it.
	Start map[string]string `json:"start,omitempty"`
	// Says is what it prints then, with @SOCKET@ and @CERTIFICATE@ for what differs.
	Says string `json:"says,omitempty"`

	// Host and Plugin name who speaks and where: describe, heartbeat and shutdown are methods, any other name is a
	// session's stream. Answers of one stream that follow each other may come in any order.
	Host   string `json:"host,omitempty"`
	Plugin string `json:"plugin,omitempty"`
	// Message is what is said, in the JSON of protobuf. The text of an error is *: it is for people.
	Message json.RawMessage `json:"message,omitempty"`
	// Or are other answers that are right.
	Or []json.RawMessage `json:"or,omitempty"`
	// Free are fields of the answer that are up to the connector.
	Free []string `json:"free,omitempty"`
	// Newer says that Bytes has fields that protocol 1 does not have yet, in every message.
	Newer bool `json:"newer,omitempty"`
	// Bytes are the message as it is sent.
	Bytes []byte `json:"bytes,omitempty"`
	// Status is the gRPC status with which the plugin ends a stream.
	Status string `json:"status,omitempty"`
	// Ends says that the host ends a stream without Close, as it does when it is killed.
	Ends bool `json:"ends,omitempty"`

	// Wipe are blocks of the cache that the engine now uses for something else.
	Wipe []int `json:"wipe,omitempty"`
	// Holds says which block of the cache must now have the first bytes of which other one. All other bytes are as they were.
	Holds map[string]int `json:"holds,omitempty"`
	// Files are the files in the connector's folder, with the SHA-256 of each.
	Files map[string]string `json:"files,omitzero"`
	// Exits says that the plugin's process ends by itself, with code 0.
	Exits bool `json:"exits,omitempty"`
}

// Read reads a transcript. Errors name the line.
func Read(path string) ([]Line, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var lines []Line
	scan := bufio.NewScanner(bytes.NewReader(data))
	for scan.Scan() {
		var l Line
		d := json.NewDecoder(bytes.NewReader(scan.Bytes()))
		d.DisallowUnknownFields()
		if err := d.Decode(&l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, len(lines)+1, err)
		}
		lines = append(lines, l)
	}
	return lines, scan.Err()
}

// Write writes a transcript as Read reads it.
func Write(path string, lines []Line) error {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	for i := range lines {
		if err := e.Encode(&lines[i]); err != nil {
			return fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// method is where something is said.
type method struct {
	path              string
	request, response proto.Message // empty ones
	stream            bool
}

// methodOf finds the method behind the name in a Line.
func methodOf(name string) method {
	switch name {
	case "describe":
		return method{kvportv1.Plugin_Describe_FullMethodName, &kvportv1.DescribeRequest{}, &kvportv1.DescribeResponse{}, false}
	case "heartbeat":
		return method{kvportv1.Plugin_Heartbeat_FullMethodName, &kvportv1.HeartbeatRequest{}, &kvportv1.HeartbeatResponse{}, false}
	case "shutdown":
		return method{"/plugin.GRPCController/Shutdown", &emptypb.Empty{}, &emptypb.Empty{}, false}
	}
	return method{kvportv1.Plugin_Session_FullMethodName, &kvportv1.SessionRequest{}, &kvportv1.SessionResponse{}, true}
}

// message is what the line says.
func (l *Line) message() (proto.Message, error) {
	if l.Host != "" {
		return parse(l.Message, methodOf(l.Host).request)
	}
	return parse(l.Message, methodOf(l.Plugin).response)
}

// answers are the messages that the line allows.
func (l *Line) answers() ([]proto.Message, error) {
	var all []proto.Message
	for _, text := range append([]json.RawMessage{l.Message}, l.Or...) {
		m, err := parse(text, methodOf(l.Plugin).response)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

func parse(text json.RawMessage, kind proto.Message) (proto.Message, error) {
	m := kind.ProtoReflect().New().Interface()
	if err := protojson.Unmarshal(text, m); err != nil {
		return nil, fmt.Errorf("message %s: %w", text, err)
	}
	return m, nil
}

// Encoded is what Bytes must be: the message with its fields in order, and with further ones if Newer is set.
func (l *Line) Encoded() ([]byte, error) {
	m, err := l.message()
	if err != nil {
		return nil, err
	}
	return l.encode(m)
}

func (l *Line) encode(m proto.Message) ([]byte, error) {
	if l.Newer {
		grow(m.ProtoReflect())
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// grow adds fields of two wire types, which protocol 1 does not have, to a message and all that are in it.
func grow(m protoreflect.Message) {
	const text, number = 900, 901
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				grow(v.List().Get(i).Message())
			}
		default:
			grow(v.Message())
		}
		return true
	})
	more := protowire.AppendTag(nil, text, protowire.BytesType)
	more = protowire.AppendString(more, "of a later version")
	more = protowire.AppendTag(more, number, protowire.VarintType)
	m.SetUnknown(protowire.AppendVarint(more, 1))
}

// dirMark is, in a transcript, the folder in which the connector keeps its files.
const dirMark = "@DIR@"

// anyText stands for the text of an error, which is for people.
const anyText = "*"

// mask removes from an answer what a transcript does not fix: the texts of errors, and fields that are free.
func mask(m proto.Message, free []string) {
	r := m.ProtoReflect()
	if f := r.Descriptor().Fields().ByName("error"); f != nil && r.Has(f) {
		if e, ok := r.Get(f).Message().Interface().(*kvportv1.Error); ok && e.Message != "" {
			e.Message = anyText
		}
	}
	for _, name := range free {
		if f := r.Descriptor().Fields().ByTextName(name); f != nil {
			r.Clear(f)
		}
	}
}

// ErrDiffers says that a plugin did something that its transcript does not allow.
var ErrDiffers = errors.New("the transcript does not allow this")

// allows says whether an answer is one of those that the line allows.
func (l *Line) allows(got proto.Message) error {
	all, err := l.answers()
	if err != nil {
		return err
	}
	mask(got, l.Free)
	for _, want := range all {
		if mask(want, l.Free); proto.Equal(want, got) {
			return nil
		}
	}
	return fmt.Errorf("%w: %s answered %v, want %v", ErrDiffers, l.Plugin, got, all)
}
