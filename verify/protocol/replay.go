package protocol

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/kvport/kvport/internal/shm"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// patience is how long one answer may take, and the end of the process.
const patience = 60 * time.Second

// settling is how long a stream is watched, before it ends, for answers that nobody waits for, unless a Player says otherwise.
const settling = 100 * time.Millisecond

// The cache that transcripts are about: one region, with 8 blocks in two segments. Block b has 256 bytes at 256 b and
// 48 bytes at 2048 + 64 b.
const (
	cacheBytes = 4096
	segment0   = 256
	segment1   = 48
	offset1    = 2048
	stride1    = 64
)

// spans are the parts of a block in a cache.
func spans(cache []byte, block int) [2][]byte {
	a, b := block*segment0, offset1+block*stride1
	return [2][]byte{cache[a : a+segment0], cache[b : b+segment1]}
}

// newCache is what the cache has at first.
func newCache() []byte {
	cache := make([]byte, cacheBytes)
	for i := range cache {
		cache[i] = byte(31 * i % 251)
	}
	return cache
}

// Player plays transcripts to a plugin.
type Player struct {
	// Program is the plugin.
	Program string
	// Frozen are the descriptors of protocol 1.0. What an answer has beside that is not compared: protocol 1 grows.
	Frozen *protoregistry.Files
	// Known, unless nil, are the descriptors of an older host: an answer with a field that they lack could not be read there.
	Known *protoregistry.Files
	// Settling is how long a stream is watched, before it ends, for answers that nobody waits for; 0: 100 ms.
	Settling time.Duration
}

// Replay plays the host's side of a transcript and checks the plugin's side. dir is the folder in the config of the transcript,
// @DIR@. An error names the line, and wraps ErrDiffers if the plugin is wrong.
func (p *Player) Replay(ctx context.Context, lines []Line, dir string) (err error) {
	cache, err := shm.Create("kvport-transcript", cacheBytes)
	if err != nil {
		return err
	}
	board, err := shm.NewBoard()
	if err != nil {
		return errors.Join(err, cache.Close())
	}
	defer func() { err = errors.Join(err, cache.Close(), board.Close()) }()
	copy(cache.Bytes(), newCache())
	r := &replay{
		Player: p, dir: dir, inherit: []*os.File{cache.File(), board.Region().File()},
		cache: cache.Bytes(), want: newCache(), streams: map[string]*stream{},
	}
	defer func() {
		if r.process == nil {
			return
		}
		if said := r.process.close(); err != nil {
			err = fmt.Errorf("%w; the plugin's standard error: %s", err, said)
		}
	}()
	for n := 0; n < len(lines); {
		next := n + 1
		for lines[n].Plugin != "" && next < len(lines) && lines[next].Plugin == lines[n].Plugin {
			next++
		}
		if err := r.play(ctx, lines[n:next]); err != nil {
			return fmt.Errorf("line %d: %w", n+1, err)
		}
		n = next
	}
	for name, s := range r.streams {
		if err := r.surplus(name, s); err != nil {
			return fmt.Errorf("at the end: %w", err)
		}
	}
	return nil
}

type replay struct {
	*Player
	dir     string
	inherit []*os.File
	cache   []byte // as the plugin sees it
	want    []byte // what it must be
	starts  *Line
	process *process
	answer  []byte // to the last unary request
	streams map[string]*stream
}

// stream is one session.
type stream struct {
	grpc.ClientStream
	cancel context.CancelFunc
	said   chan []byte     // closed at the end
	err    error           // how it ended, once said is closed
	open   map[uint64]bool // calls that have no answer yet
}

// play does what a line says. Several lines are answers on one stream.
func (r *replay) play(ctx context.Context, lines []Line) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	switch l := &lines[0]; {
	case l.Start != nil:
		r.starts = l
		return nil
	case l.Says != "":
		p, err := start(context.WithoutCancel(ctx), r.Program, r.starts, l.Says, r.inherit...)
		r.process = p
		return err
	case l.Host != "":
		return r.send(ctx, l)
	case l.Plugin != "" && methodOf(l.Plugin).stream:
		return r.receive(ctx, lines)
	case l.Plugin != "":
		return r.check(l, r.answer)
	case l.Wipe != nil:
		for _, block := range l.Wipe {
			for _, span := range [][2][]byte{spans(r.cache, block), spans(r.want, block)} {
				clear(span[0])
				clear(span[1])
			}
		}
		return nil
	case l.Holds != nil:
		return r.holds(l.Holds)
	case l.Files != nil:
		return r.files(l.Files)
	case l.Exits:
		return r.process.exits(ctx)
	}
	return nil
}

// send says what the host says.
func (r *replay) send(ctx context.Context, l *Line) error {
	data, err := l.placed(r.dir)
	if err != nil {
		return err
	}
	m := methodOf(l.Host)
	if !m.stream {
		r.answer = nil
		err := r.process.conn.Invoke(ctx, m.path, &data, &r.answer)
		if l.Host == "shutdown" && status.Code(err) == codes.Unavailable {
			return nil // it has hung up already
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDiffers, l.Host, err)
		}
		return nil
	}
	s := r.streams[l.Host]
	if l.Ends && s == nil {
		return fmt.Errorf("no stream is called %q", l.Host)
	}
	if l.Ends {
		err := r.surplus(l.Host, s)
		s.cancel()
		delete(r.streams, l.Host)
		return err
	}
	if s == nil {
		if s, err = r.open(m.path); err != nil {
			return err
		}
		r.streams[l.Host] = s
	}
	s.called(data)
	return s.SendMsg(&data)
}

// called notes that a call must be answered once. A Cancel has no answer, and what cannot be read has none that anybody knows.
func (s *stream) called(data []byte) {
	var m kvportv1.SessionRequest
	if proto.Unmarshal(data, &m) == nil && m.GetCancel() == nil {
		s.open[m.GetId()] = true
	}
}

// answeredCall notes that a call was answered, and reports whether it still had no answer.
func (s *stream) answeredCall(data []byte) (id uint64, waited bool) {
	var m kvportv1.SessionResponse
	if proto.Unmarshal(data, &m) != nil {
		return 0, false
	}
	waited = s.open[m.GetId()]
	delete(s.open, m.GetId())
	return m.GetId(), waited
}

// surplus finds answers that the transcript does not wait for, and that are to no call which has no answer yet.
func (p *Player) surplus(name string, s *stream) error {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(p.Settling, settling))
	defer cancel()
	for {
		data, err := s.next(ctx)
		if err != nil {
			return nil // it has ended, or is silent
		}
		if id, waited := s.answeredCall(data); !waited {
			return fmt.Errorf("%w: %s got a surplus answer of %d bytes, to call %d", ErrDiffers, name, len(data), id)
		}
	}
}

// placed is what is sent: Bytes, with the real folder instead of @DIR@ in a config.
func (l *Line) placed(dir string) ([]byte, error) {
	if !bytes.Contains(l.Bytes, []byte(dirMark)) {
		return l.Bytes, nil
	}
	m, err := l.message()
	if err != nil {
		return nil, err
	}
	switch m := m.(type) {
	case *kvportv1.DescribeRequest:
		m.Config = bytes.ReplaceAll(m.GetConfig(), []byte(dirMark), []byte(dir))
	case *kvportv1.SessionRequest:
		m.GetOpen().Config = bytes.ReplaceAll(m.GetOpen().GetConfig(), []byte(dirMark), []byte(dir))
	}
	return l.encode(m)
}

func (r *replay) open(path string) (*stream, error) {
	ctx, cancel := context.WithCancel(context.Background())
	both := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	c, err := r.process.conn.NewStream(ctx, both, path)
	if err != nil {
		cancel()
		return nil, err
	}
	s := &stream{ClientStream: c, cancel: cancel, said: make(chan []byte, 16), open: map[uint64]bool{}}
	go func() {
		defer close(s.said)
		for {
			var data []byte
			if s.err = c.RecvMsg(&data); s.err != nil {
				return
			}
			s.said <- data
		}
	}()
	return s, nil
}

// receive takes as many answers as there are lines, in any order.
func (r *replay) receive(ctx context.Context, lines []Line) error {
	s := r.streams[lines[0].Plugin]
	if s == nil {
		return fmt.Errorf("no stream is called %q", lines[0].Plugin)
	}
	for waiting := lines; len(waiting) > 0; {
		if waiting[0].Status != "" {
			return r.ended(ctx, s, &waiting[0])
		}
		data, err := s.next(ctx)
		if err != nil {
			return fmt.Errorf("%w: no answer on %s: %w", ErrDiffers, lines[0].Plugin, err)
		}
		n, err := answered(waiting, data)
		if err != nil {
			return err
		}
		s.answeredCall(data)
		if err := r.check(&waiting[n], data); err != nil {
			return err
		}
		waiting = append(append([]Line{}, waiting[:n]...), waiting[n+1:]...)
	}
	return nil
}

// answered finds the line with the id of an answer; the first if there is none.
func answered(lines []Line, data []byte) (int, error) {
	var got kvportv1.SessionResponse
	if err := proto.Unmarshal(data, &got); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrDiffers, err)
	}
	for n := range lines {
		if lines[n].Status != "" {
			continue
		}
		want, err := lines[n].message()
		if err != nil {
			return 0, err
		}
		if m, ok := want.(*kvportv1.SessionResponse); ok && m.GetId() == got.GetId() {
			return n, nil
		}
	}
	return 0, nil
}

func (s *stream) next(ctx context.Context) ([]byte, error) {
	select {
	case data, more := <-s.said:
		if !more {
			return nil, s.err
		}
		return data, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ended waits for the status with which the plugin ends a stream.
func (r *replay) ended(ctx context.Context, s *stream, l *Line) error {
	data, err := s.next(ctx)
	if err == nil {
		return fmt.Errorf("%w: %s got an answer of %d bytes, want the end", ErrDiffers, l.Plugin, len(data))
	}
	s.cancel()
	delete(r.streams, l.Plugin)
	var want, got codes.Code // of io.EOF: OK
	if !errors.Is(err, io.EOF) {
		got = status.Code(err)
	}
	if err := want.UnmarshalJSON([]byte(strconv.Quote(l.Status))); err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%w: %s ended with %s (%w), want %s", ErrDiffers, l.Plugin, got, err, l.Status)
	}
	return nil
}

// check compares an answer with a line.
func (r *replay) check(l *Line, data []byte) error {
	m := methodOf(l.Plugin).response.ProtoReflect().New().Interface()
	if err := proto.Unmarshal(data, m); err != nil {
		return fmt.Errorf("%w: %w", ErrDiffers, err)
	}
	m, err := reduce(r.Frozen, m)
	if err == nil && r.Known != nil { // what that host does not know, it ignores
		m, err = reduce(r.Known, m)
	}
	if err != nil {
		return err
	}
	return l.allows(m)
}

// reduce gives a message without the fields that a set of descriptors lacks.
func reduce(to *protoregistry.Files, m proto.Message) (proto.Message, error) {
	d, err := to.FindDescriptorByName(m.ProtoReflect().Descriptor().FullName())
	if errors.Is(err, protoregistry.NotFound) {
		return m, nil // of go-plugin
	} else if err != nil {
		return nil, err
	}
	data, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	less := dynamicpb.NewMessage(d.(protoreflect.MessageDescriptor)) //nolint:forcetypeassert // names of messages
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, less); err != nil {
		return nil, err
	}
	if data, err = proto.Marshal(less); err != nil {
		return nil, err
	}
	reduced := m.ProtoReflect().New().Interface()
	return reduced, proto.Unmarshal(data, reduced)
}

// Known checks that a message has only fields that a set of descriptors has; nil knows all.
func Known(known *protoregistry.Files, name protoreflect.FullName, data []byte) error {
	if known == nil {
		return nil
	}
	d, err := known.FindDescriptorByName(name)
	if errors.Is(err, protoregistry.NotFound) {
		return nil // of go-plugin
	} else if err != nil {
		return err
	}
	m := dynamicpb.NewMessage(d.(protoreflect.MessageDescriptor)) //nolint:forcetypeassert // names of messages
	if err := proto.Unmarshal(data, m); err != nil {
		return err
	}
	if lost := unknown(m); lost != "" {
		return fmt.Errorf("%w: %s has fields that the other end does not know", ErrDiffers, lost)
	}
	return nil
}

// unknown is the name of a message with fields that its descriptor lacks; empty if there is none.
func unknown(m protoreflect.Message) (lost string) {
	if len(m.GetUnknown()) > 0 {
		return string(m.Descriptor().FullName())
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil:
		case f.IsList():
			for i := 0; i < v.List().Len() && lost == ""; i++ {
				lost = unknown(v.List().Get(i).Message())
			}
		default:
			lost = unknown(v.Message())
		}
		return lost == ""
	})
	return lost
}

// holds checks the whole cache.
func (r *replay) holds(blocks map[string]int) error {
	first := newCache()
	for to, from := range blocks {
		block, err := strconv.Atoi(to)
		if err != nil {
			return err
		}
		source := spans(first, from)
		for n, s := range spans(r.want, block) {
			copy(s, source[n])
		}
	}
	for i := range r.want {
		if r.cache[i] != r.want[i] {
			return fmt.Errorf("%w: byte %d of the cache is %d, want %d", ErrDiffers, i, r.cache[i], r.want[i])
		}
	}
	return nil
}

// files checks what the connector has stored.
func (r *replay) files(want map[string]string) error {
	got, err := Stored(r.dir)
	if err != nil {
		return err
	}
	if !maps.Equal(got, want) {
		return fmt.Errorf("%w: it stored %v, want %v", ErrDiffers, got, want)
	}
	return nil
}

// Stored are the files of a folder, with the SHA-256 of each in hex.
func Stored(dir string) (map[string]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(data)
		files[e.Name()] = hex.EncodeToString(sum[:])
	}
	return files, nil
}
