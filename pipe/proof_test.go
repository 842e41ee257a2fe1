package pipe

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// outcome is the result at each of the two ends of a connection.
type outcome struct{ dialer, listener error }

// meet makes two ends with one key each prove them to each other; see meetAll.
func meet(t *testing.T, dialer, listener []byte, about [2]string, by func(to string) string) outcome {
	t.Helper()
	return meetAll(t, [2][]connector.Secret{{dialer}, {listener}}, about, by)
}

// meetAll makes two ends prove their keys to each other; by is where the dialer dials, "" for the listener
// itself.
func meetAll(t *testing.T, keys [2][]connector.Secret, about [2]string, by func(to string) string) outcome {
	t.Helper()
	dialer, listener := keys[0], keys[1]
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		var hello [1]byte
		if _, err := io.ReadFull(conn, hello[:]); err != nil {
			done <- err
			return
		}
		done <- Demand(conn, listener[0], []byte(about[1]), listener[1:]...)
	}()
	to := l.Addr().String()
	if by != nil {
		to = by(to)
	}
	conn, err := net.Dial("tcp", to)
	require.NoError(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	var o outcome
	finish, err := Prove(conn, dialer[0], []byte(about[0]), dialer[1:]...)
	require.NoError(t, err)
	if o.dialer = finish(); o.dialer != nil {
		_ = conn.Close()
	}
	o.listener = <-done
	return o
}

func TestProof(t *testing.T) {
	one, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	o := meet(t, one, one, [2]string{"a", "a"}, nil)
	require.NoError(t, o.dialer)
	require.NoError(t, o.listener)
	for name, o := range map[string]outcome{
		"another key":   meet(t, other, one, [2]string{"a", "a"}, nil),
		"another hello": meet(t, one, one, [2]string{"a", "b"}, nil),
	} {
		require.ErrorIs(t, o.dialer, connector.ErrIncompatible, name)
		require.ErrorContains(t, o.dialer, "kvport.ticket_key_file", name)
		require.Error(t, o.listener, name)
	}
}

// While the key is replaced, plugins have one or both of two keys, as they were opened before or after each step. All that
// have a key in common find it, by a proof and by TLS. Nobody else gets in.
func TestProofWhileKeysAreReplaced(t *testing.T) {
	a, b, c := connector.Secret(bytes.Repeat([]byte{1}, 32)), connector.Secret(bytes.Repeat([]byte{2}, 32)), connector.Secret(bytes.Repeat([]byte{3}, 32))
	states := [][]connector.Secret{{a}, {a, b}, {b, a}, {b}}
	for i, dialer := range states {
		for j, listener := range states {
			o := meetAll(t, [2][]connector.Secret{dialer, listener}, [2]string{"a", "a"}, nil)
			secured := secure(t, dialer, listener)
			if i+j == 3 && i*j == 0 { // only the old one, and only the new one
				require.ErrorIs(t, o.dialer, connector.ErrIncompatible)
				require.Error(t, o.listener)
				require.Error(t, secured.listener)
				continue
			}
			require.Equal(t, outcome{}, o, "opened in steps %d and %d", i, j)
			require.Equal(t, outcome{}, secured, "opened in steps %d and %d", i, j)
		}
		for _, strange := range [][]connector.Secret{{c}, {c, c}} {
			require.Error(t, meetAll(t, [2][]connector.Secret{strange, dialer}, [2]string{"a", "a"}, nil).listener)
			require.ErrorIs(t, meetAll(t, [2][]connector.Secret{dialer, strange}, [2]string{"a", "a"}, nil).dialer, connector.ErrIncompatible)
			require.Error(t, secure(t, strange, dialer).listener)
			require.Error(t, secure(t, dialer, strange).dialer)
		}
	}
}

// A dialer of an earlier version says nothing of its key: it is served by the listener's first one.
func TestProofOfEarlierDialers(t *testing.T) {
	a, b := connector.Secret(bytes.Repeat([]byte{1}, 32)), connector.Secret(bytes.Repeat([]byte{2}, 32))
	p := &proof{keys: []connector.Secret{b, a}}
	require.Equal(t, b, p.hinted())
	for _, key := range p.keys {
		dialer := &proof{keys: []connector.Secret{key}}
		dialer.nonce()
		p.dialer = dialer.dialer
		require.Equal(t, key, p.hinted())
	}
}

// earlierTLS is what earlier versions made of a key: a certificate of another name, and no hints.
func earlierTLS(t *testing.T, key []byte) *tls.Config {
	config, err := KeyTLS(key)
	require.NoError(t, err)
	private, err := keyPair(key)
	require.NoError(t, err)
	cert, err := certify(private, peerName)
	require.NoError(t, err)
	config.Certificates, config.ClientCAs, config.ServerName, config.GetClientCertificate = []tls.Certificate{cert}, nil, "", nil
	return config
}

// Peers of earlier versions have the first key, and TLS between the two works in both directions.
func TestKeyTLSWithEarlierVersions(t *testing.T) {
	a, b := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	now, err := KeyTLS(a, b)
	require.NoError(t, err)
	require.Equal(t, outcome{}, shake(t, now, earlierTLS(t, a)))
	require.Equal(t, outcome{}, shake(t, earlierTLS(t, a), now))
	require.Error(t, shake(t, earlierTLS(t, b), now).dialer)
}

func secure(t *testing.T, dialer, listener []connector.Secret) outcome {
	t.Helper()
	var configs [2]*tls.Config
	for i, keys := range [][]connector.Secret{dialer, listener} {
		var more [][]byte
		for _, k := range keys[1:] {
			more = append(more, k)
		}
		config, err := KeyTLS(keys[0], more...)
		require.NoError(t, err)
		configs[i] = config
	}
	return shake(t, configs[0], configs[1])
}

// shake is one of TLS, and a byte from the listener, without which the dialer does not know whether it is accepted.
func shake(t *testing.T, dialer, listener *tls.Config) (o outcome) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer a.Close()
	b, err := l.Accept()
	require.NoError(t, err)
	deadline := time.Now().Add(time.Minute)
	require.NoError(t, errors.Join(a.SetDeadline(deadline), b.SetDeadline(deadline)))
	done := make(chan error, 1)
	go func() {
		conn := tls.Server(b, listener)
		_, err := conn.Write([]byte{1})
		done <- errors.Join(err, b.Close())
	}()
	_, o.dialer = tls.Client(a, dialer).Read(make([]byte, 1))
	_ = a.Close()
	o.listener = <-done
	return o
}

// A dialer that does not check the listener's proof still has to prove the key itself.
func TestDialerHasToProve(t *testing.T) {
	key := connector.Secret(bytes.Repeat([]byte{1}, 32))
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan error, 1)
	go func() { done <- Demand(b, key, nil) }()
	_, err := a.Write(append(append(make([]byte, nonceSize), byte(len("pipe to pipe"))), "pipe to pipe"...))
	require.NoError(t, err)
	theirs := make([]byte, 1+nonceSize+macSize)
	_, err = io.ReadFull(a, theirs)
	require.NoError(t, err)
	_, err = a.Write(theirs[1+nonceSize:]) // what the listener said
	require.NoError(t, err)
	require.ErrorIs(t, <-done, connector.ErrIncompatible)
}

// forward forwards connections as the user as.
func forward(t *testing.T, as int) func(to string) string {
	return func(to string) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var tasks sync.WaitGroup
		t.Cleanup(func() {
			cancel()
			_ = l.Close()
			tasks.Wait()
		})
		tasks.Go(func() {
			in, err := l.Accept()
			if err != nil {
				return
			}
			defer in.Close()
			out, err := dialAs(ctx, as, to)
			if err != nil {
				return
			}
			defer out.Close()
			stop := context.AfterFunc(ctx, func() { _, _ = in.Close(), out.Close() })
			defer stop()
			tasks.Go(func() {
				_, _ = io.Copy(out, in)
				_ = out.Close()
			})
			_, _ = io.Copy(in, out)
		})
		return l.Addr().String()
	}
}

// dialAs makes a connection whose socket is a user's.
func dialAs(ctx context.Context, uid int, to string) (net.Conn, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0)
	defer func() { _, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(os.Getuid()), 0, 0) }()
	return new(net.Dialer).DialContext(ctx, "tcp", to)
}

// A stranger that listens at a producer's port while the producer is away keeps the consumer's connection,
// gives the port back and forwards everything to the producer: both ends then see the address that they
// expect, and only the dialer's own address shows that somebody is in between.
func TestProofThroughThePortsFormerOwner(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("a stranger is not tried: only the administrator can be somebody else here")
		return
	}
	key := connector.Secret(bytes.Repeat([]byte{1}, 32))
	former, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := former.Addr().String()
	dialer, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer dialer.Close()
	in, err := former.Accept()
	require.NoError(t, err)
	defer in.Close()
	require.NoError(t, former.Close())
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	defer l.Close()
	out, err := dialAs(t.Context(), 65534, address)
	require.NoError(t, err)
	defer out.Close()
	listener, err := l.Accept()
	require.NoError(t, err)
	defer listener.Close()
	go func() { _, _ = io.Copy(out, in) }() // they end with their connections
	go func() { _, _ = io.Copy(in, out) }()
	done := make(chan error, 1)
	go func() { done <- Demand(listener, key, nil) }()
	finish, err := Prove(dialer, key, nil)
	require.NoError(t, err)
	require.ErrorIs(t, finish(), connector.ErrIncompatible)
	require.ErrorIs(t, <-done, connector.ErrIncompatible)
}

// A process between two ends that prove their keys belongs to this user, or is refused: a stranger may have
// taken the port of a producer that has died, and could read everything from there.
func TestProofThroughSomebodyElse(t *testing.T) {
	key := bytes.Repeat([]byte{1}, 32)
	o := meet(t, key, key, [2]string{"a", "a"}, forward(t, os.Getuid()))
	require.NoError(t, o.dialer)
	require.NoError(t, o.listener)
	if os.Getuid() != 0 {
		t.Log("a stranger is not tried: only the administrator can be somebody else here")
		return
	}
	o = meet(t, key, key, [2]string{"a", "a"}, forward(t, 65534))
	require.ErrorIs(t, o.listener, connector.ErrIncompatible)
	require.ErrorContains(t, o.listener, "key_file")
	require.ErrorIs(t, o.dialer, connector.ErrIncompatible)
}

func TestOwnerOf(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:A639 00000000:0000 0A 00000000:00000000 00:00000000 00000000     7        0 248188 2 0 100 0 0 10 0
   1: 0100007F:A639 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000        0 241741 1 0 100 0 0 10 0
   2: 0100007F:A640 0100007F:0050 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0 100 0 0 10 0
   3: 00000000000000000000000001000000:A639 00000000000000000000000001000000:0051 01 00000000:00000000 00:00000000 00000000  1001 0 1 1 0
   4: short
`
	loopback := func(port int) *net.TCPAddr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port} }
	uid, known := ownerOf(table, loopback(0xA639), loopback(80))
	require.True(t, known)
	require.Equal(t, 1000, uid)
	uid, known = ownerOf(table, &net.TCPAddr{IP: net.IPv6loopback, Port: 0xA639}, &net.TCPAddr{IP: net.IPv6loopback, Port: 0x51})
	require.True(t, known)
	require.Equal(t, 1001, uid)
	for name, port := range map[string]int{"closing": 0xA640, "nobody": 1} {
		_, known = ownerOf(table, loopback(port), loopback(80))
		require.False(t, known, name)
	}
}

// Silent strangers keep nobody out: the oldest of them is dropped.
func TestAcceptorDropsTheOldestStranger(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	met := make(chan struct{})
	a := NewAcceptor(inner, func(_ context.Context, conn net.Conn, _ *Acceptor) error {
		var b [1]byte
		if _, err := io.ReadFull(conn, b[:]); err != nil {
			return err
		}
		close(met)
		return conn.Close()
	})
	defer a.Close()
	a.mu.Lock()
	a.look = time.Now().Add(time.Hour) // nobody knows who they are
	a.mu.Unlock()
	first, err := net.Dial("tcp", a.Addr().String())
	require.NoError(t, err)
	defer first.Close()
	for range maxPending {
		conn, err := net.Dial("tcp", a.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
	}
	require.NoError(t, first.SetReadDeadline(time.Now().Add(handshakeTimeout/2)))
	_, err = first.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "it goes at once, not after its time")
	last, err := net.Dial("tcp", a.Addr().String())
	require.NoError(t, err)
	defer last.Close()
	_, err = last.Write([]byte{1})
	require.NoError(t, err)
	<-met
}
