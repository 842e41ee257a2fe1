package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/native/ucx"
)

// rawBinary is the name under which this program is the other process of NIXL and UCX alone.
const rawBinary = "kvport-bench-raw"

// rawOffer is what that process says: how its memory is reached. Where something is missing, a field beside it says why.
type rawOffer struct {
	Addr    uint64 `json:"addr"`
	NIXL    []byte `json:"nixl,omitempty"` // metadata of its agent
	NoNIXL  string `json:"no_nixl,omitempty"`
	UCX     []byte `json:"ucx,omitempty"` // address of its worker
	Key     []byte `json:"key,omitempty"` // of its memory
	NoUCX   string `json:"no_ucx,omitempty"`
	Failure string `json:"failure,omitempty"`
}

// loopback keeps the TCP listeners of UCX off the network.
const loopback = "lo"

// serveRaw is the other process: it offers the memory that it is asked for until its stdin ends.
func serveRaw() {
	var offer rawOffer
	end, err := offerMemory(&offer)
	if err != nil {
		offer.Failure = err.Error()
	}
	if json.NewEncoder(os.Stdout).Encode(offer) != nil || err != nil {
		os.Exit(1)
	}
	commands := make(chan byte)
	go func() {
		defer close(commands)
		for in := bufio.NewReader(os.Stdin); ; {
			c, err := in.ReadByte()
			if err != nil {
				return
			}
			commands <- c
		}
	}()
	end.serve(commands)
	os.Exit(0) // the libraries are left as they are
}

const (
	spinCommand = 's'
	restCommand = 'r'
)

// serve lets a peer connect, and bytes come and go over TCP, until there are no more commands; over shared
// memory others read without us.
func (e *rawEnd) serve(commands <-chan byte) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	always := make(chan time.Time)
	close(always)
	next := tick.C
	for {
		select {
		case c, more := <-commands:
			if !more {
				return
			}
			if next = tick.C; c == spinCommand {
				next = always
			}
			if _, err := os.Stdout.Write([]byte{c}); err != nil {
				return
			}
		case <-next:
			e.progress()
		}
	}
}

// rawEnd is one end of NIXL and of UCX; nil is what is not there.
type rawEnd struct {
	memory  *host.Region
	agent   *nixl.Agent
	backend *nixl.Backend
	worker  *ucx.Worker
	mapped  *ucx.Memory
}

func offerMemory(offer *rawOffer) (*rawEnd, error) {
	if len(os.Args) != 2 {
		return nil, errors.New("want the number of bytes")
	}
	size, err := strconv.ParseInt(os.Args[1], 10, 64)
	if err != nil {
		return nil, err
	}
	e := &rawEnd{}
	if e.memory, err = host.NewRegion(size); err != nil {
		return nil, err
	}
	fill(e.memory.Bytes())
	offer.Addr = nixl.Bytes(e.memory.Bytes()).Addr
	if err = e.openNIXL(rawBinary); err == nil {
		offer.NIXL, err = e.agent.Metadata()
	}
	if err != nil {
		offer.NoNIXL = err.Error()
	}
	if err = e.openUCX(); err == nil {
		offer.UCX, err = e.worker.Address()
	}
	if err == nil {
		offer.Key, err = e.mapped.Key()
	}
	if err != nil {
		offer.NoUCX = err.Error()
	}
	return e, nil
}

// shareMemory has UCX open no port, where nothing else is asked of it: it lets anybody write through one.
func shareMemory() error {
	if os.Getenv("UCX_TLS") != "" {
		return nil
	}
	return errors.Join(os.Setenv("UCX_TLS", ucx.SharedMemory), os.Setenv("UCX_POSIX_ERROR_HANDLING", "y"))
}

// openNIXL makes an agent that knows the memory.
func (e *rawEnd) openNIXL(name string) error {
	if err := shareMemory(); err != nil {
		return err
	}
	lib, err := nixl.Open("")
	if err != nil {
		return err
	}
	if e.agent, err = lib.NewAgent(name, nixl.Options{}); err != nil {
		return err
	}
	if e.backend, err = e.agent.Backend("UCX", map[string]string{"engine_config": "NET_DEVICES=" + loopback}); err != nil {
		return err
	}
	_, err = e.agent.Register(e.backend, nixl.DRAM, nixl.Bytes(e.memory.Bytes()))
	return err
}

// openUCX makes a worker that knows the memory.
func (e *rawEnd) openUCX() error {
	if err := shareMemory(); err != nil {
		return err
	}
	lib, err := ucx.Open("")
	if err != nil {
		return err
	}
	if e.worker, err = lib.NewWorker(ucx.Options{Devices: loopback}); err != nil {
		return err
	}
	e.mapped, err = e.worker.Map(e.memory.Bytes())
	return err
}

// progress lets a peer connect. Errors show at the peer.
func (e *rawEnd) progress() {
	if e.agent != nil {
		_, _ = e.agent.Notifications()
	}
	if e.worker != nil {
		_, _ = e.worker.Progress()
	}
}

func (e *rawEnd) close() error {
	var errs []error
	if e.agent != nil {
		errs = append(errs, e.agent.Close())
	}
	if e.worker != nil {
		errs = append(errs, e.worker.Close())
	}
	return errors.Join(errs...)
}

// raw reads from another process with NIXL and with UCX, and nothing of ours around them.
type raw struct {
	end   rawEnd
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	peer  string // NIXL's name of the other agent
	to    *ucx.Endpoint
	key   *ucx.Key
	offer rawOffer
	// noNIXL and noUCX say why one is not there; empty: it is.
	noNIXL, noUCX string
}

// openRaw starts the other process, with as much memory as there is here. The memory stays the caller's.
func openRaw(ctx context.Context, self string, memory *host.Region) (_ *raw, err error) {
	dir, err := os.MkdirTemp("", "kvport-bench-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, rawBinary)
	if err := os.Symlink(self, path); err != nil {
		return nil, fmt.Errorf("peer of the benchmark: %w", err)
	}
	r := &raw{end: rawEnd{memory: memory}}
	r.cmd = exec.CommandContext(ctx, path, strconv.FormatInt(memory.Size(), 10))
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("peer of the benchmark: %w", err)
	}
	r.out = bufio.NewReader(out)
	line, err := r.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &r.offer)
	}
	if err == nil && r.offer.Failure != "" {
		err = errors.New(r.offer.Failure)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("peer of the benchmark: %w", err), r.close())
	}
	if err := r.meetNIXL(); err != nil {
		r.noNIXL = err.Error()
	}
	if err := r.meetUCX(); err != nil {
		r.noUCX = err.Error()
	}
	return r, nil
}

func (r *raw) meetNIXL() error {
	if r.offer.NoNIXL != "" {
		return errors.New(r.offer.NoNIXL)
	}
	err := r.end.openNIXL(rawBinary + "-reader")
	if err == nil {
		r.peer, err = r.end.agent.AddPeer(r.offer.NIXL)
	}
	return err
}

func (r *raw) meetUCX() error {
	if r.offer.NoUCX != "" {
		return errors.New(r.offer.NoUCX)
	}
	err := r.end.openUCX()
	if err == nil {
		r.to, err = r.end.worker.Connect(r.offer.UCX)
	}
	if err == nil {
		r.key, err = r.to.Unpack(r.offer.Key)
	}
	return err
}

// part is one block of a step: where it lies in the peer's memory, and where it goes in ours.
type part struct{ from, to, size int64 }

// moveNIXL reads the blocks as one transfer, which is prepared for them, or writes them the other way.
func (r *raw) moveNIXL(ctx context.Context, op nixl.Op, parts []part) (err error) {
	request := nixl.Request{Op: op, Peer: r.peer, Backend: r.end.backend}
	request.Local, request.Remote = make([]nixl.Region, len(parts)), make([]nixl.Region, len(parts))
	ours := nixl.Bytes(r.end.memory.Bytes()).Addr
	for i, p := range parts {
		request.Local[i] = nixl.Region{Addr: ours + uint64(p.to), Len: uint64(p.size)}
		request.Remote[i] = nixl.Region{Addr: r.offer.Addr + uint64(p.from), Len: uint64(p.size)}
	}
	t, err := r.end.agent.Prepare(request)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	return t.Run(ctx)
}

// readUCX gets the blocks one by one, all of them under way at once.
func (r *raw) readUCX(ctx context.Context, parts []part) error {
	all := make([]*ucx.Request, 0, len(parts))
	memory := r.end.memory.Bytes()
	for _, p := range parts {
		get, err := r.to.Get(memory[p.to:][:p.size], r.end.mapped, r.offer.Addr+uint64(p.from), r.key)
		if err != nil {
			return err
		}
		all = append(all, get)
	}
	for _, get := range all {
		if err := get.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// command tells the other process what to do, and waits until it does.
func (r *raw) command(c byte) error {
	if _, err := r.in.Write([]byte{c}); err != nil {
		return fmt.Errorf("peer of the benchmark: %w", err)
	}
	if _, err := r.out.ReadByte(); err != nil {
		return fmt.Errorf("peer of the benchmark: %w", err)
	}
	return nil
}

func (r *raw) close() error {
	err := r.end.close()
	return errors.Join(err, r.in.Close(), r.cmd.Wait())
}
