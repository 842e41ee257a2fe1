package protocol

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// process is a plugin that was started and met as a transcript says, with nothing of a host but what is here.
type process struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	conn   *grpc.ClientConn
	ended  chan error // how the process ended
}

// start starts a program with descriptors from 3 on, and connects to it.
func start(ctx context.Context, program string, l *Line, says string, inherit ...*os.File) (p *process, err error) {
	sockets, err := os.MkdirTemp("", "kvport-p-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(sockets) // one connection is all that is made
	own, certificate, err := newCertificate()
	if err != nil {
		return nil, err
	}
	p = &process{cmd: exec.CommandContext(ctx, program), ended: make(chan error, 1)}
	known := strings.NewReplacer("@SOCKETS@", sockets, "@CERTIFICATE@", string(certificate))
	p.cmd.Env = []string{}
	for name, value := range l.Start {
		p.cmd.Env = append(p.cmd.Env, name+"="+known.Replace(value))
	}
	p.cmd.ExtraFiles, p.cmd.Stderr, p.cmd.WaitDelay = inherit, &p.stderr, time.Second
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	silent := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	silent.Stop()
	if err == nil {
		err = p.meet(strings.TrimSuffix(line, "\n"), says, own)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	if err != nil {
		err = fmt.Errorf("%s: handshake: %w; standard error: %s", program, err, p.close())
		return nil, err
	}
	return p, nil
}

// meet checks the line that the plugin printed and connects to where that says.
func (p *process) meet(line, says string, own tls.Certificate) error {
	fields := strings.Split(line, "|")
	if len(fields) < 6 {
		return fmt.Errorf("%w: it says %q", ErrDiffers, line)
	}
	socket, certificate := fields[3], fields[5]
	fields[3], fields[5] = "@SOCKET@", "@CERTIFICATE@"
	if masked := strings.Join(fields, "|"); masked != says {
		return fmt.Errorf("%w: it says %q, want %q", ErrDiffers, masked, says)
	}
	der, err := base64.RawStdEncoding.DecodeString(certificate)
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	trusted := x509.NewCertPool()
	trusted.AddCert(parsed)
	p.conn, err = grpc.NewClient("passthrough:///plugin",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			Certificates: []tls.Certificate{own}, RootCAs: trusted, ServerName: "localhost", MinVersion: tls.VersionTLS12,
		})),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{})))
	if err != nil {
		return err
	}
	p.conn.Connect()
	return p.first()
}

// first waits until the connection stands: the socket's folder is removed after it.
func (p *process) first() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	in, out := []byte{}, []byte{}
	return p.conn.Invoke(ctx, methodOf("heartbeat").path, &in, &out)
}

// close ends the process, and gives what it wrote to standard error.
func (p *process) close() string {
	if p.conn != nil {
		_ = p.conn.Close()
	}
	_ = p.cmd.Process.Kill()
	err := <-p.ended
	p.ended <- err
	return p.stderr.String()
}

// exits waits for the end of a process whose connection is closed.
func (p *process) exits(ctx context.Context) error {
	if err := p.conn.Close(); err != nil {
		return err
	}
	select {
	case err := <-p.ended:
		p.ended <- err
		if err != nil {
			return fmt.Errorf("%w: the process ended: %w", ErrDiffers, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: the process does not end: %w", ErrDiffers, ctx.Err())
	}
}

// newCertificate makes what the host shows, and that in PEM.
func newCertificate() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// raw is a codec for messages that are bytes already, so that exactly those of a transcript are sent.
type raw struct{}

var errNotBytes = errors.New("not a *[]byte")

// Name implements encoding.CodecV2.
func (raw) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (raw) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, errNotBytes
	}
	return mem.BufferSlice{mem.SliceBuffer(*b)}, nil
}

// Unmarshal implements encoding.CodecV2.
func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return errNotBytes
	}
	*b = data.Materialize()
	return nil
}

var _ encoding.CodecV2 = raw{}
