// P2p is a connector whose engines send blocks to each other, over a Pipe of its own on unix sockets.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir string `json:"dir" jsonschema:"required,description=Folder of the sockets."`
}

// socket is a Pipe. Both directions of a link are the same connection: Send writes to it, Recv reads.
type socket struct {
	net.Conn
	sending sync.Mutex
}

// Send writes lengths, header and spans, from where they lie. Half a frame ends the connection.
func (s *socket) Send(ctx context.Context, header []byte, spans [][]byte) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	lengths := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), uint64(pipe.Size(spans)))
	frame := append(net.Buffers{lengths, header}, spans...)
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	_, err := frame.WriteTo(s.Conn)
	return lost(ctx, err)
}

func (s *socket) Recv(ctx context.Context, place pipe.Place) error {
	defer context.AfterFunc(ctx, func() { _ = s.SetReadDeadline(time.Unix(1, 0)) })()
	var lengths [16]byte
	if _, err := io.ReadFull(s.Conn, lengths[:]); err != nil {
		return lost(ctx, err)
	}
	size, payload := binary.LittleEndian.Uint64(lengths[:]), binary.LittleEndian.Uint64(lengths[8:])
	if err := pipe.Check(int(size), int64(payload)); err != nil {
		return err
	}
	header := make([]byte, size)
	_, err := io.ReadFull(s.Conn, header)
	spans, refused := pipe.Ask(place, header, int(payload))
	if refused != nil {
		spans = [][]byte{make([]byte, payload)} // read it all the same: the next frame is behind it
	}
	for i := 0; err == nil && i < len(spans); i++ {
		_, err = io.ReadFull(s.Conn, spans[i])
	}
	return errors.Join(lost(ctx, err), refused)
}

// lost says what an error of the connection means to its users.
func lost(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w: %w", connector.ErrGone, err)
}

// network makes links in one folder; addresses are paths.
type network struct{ dir string }

func (n network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", address)
	return pipe.Link{Out: &socket{Conn: conn}, In: &socket{Conn: conn}}, lost(ctx, err)
}

func (n network) Listen(ctx context.Context) (pipe.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "unix", filepath.Join(n.dir, fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())))
	return listener{l}, err
}

type listener struct{ net.Listener }

func (l listener) Address() string { return l.Addr().String() }

func (l listener) Accept(ctx context.Context) (pipe.Link, error) {
	conn, err := l.Listener.Accept()
	return pipe.Link{Out: &socket{Conn: conn}, In: &socket{Conn: conn}}, lost(ctx, err)
}

func open(_ context.Context, _ connector.Env, c config) (pipe.Peers, error) {
	return pipe.Peers{Network: network{c.Dir}}, os.MkdirAll(c.Dir, 0o700)
}

func main() {
	sdk.Serve(sdk.FromPipe(sdk.Definition{Name: "PeerExample", Version: "1", Groups: true, Needs: connector.Needs{Network: true, Writes: []string{"dir"}}}, open))
}
