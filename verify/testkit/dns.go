package testkit

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
)

// DNSServer is a small DNS server over UDP on loopback.
type DNSServer struct {
	conn net.PacketConn
	done chan struct{}

	mu      sync.Mutex
	records map[string][]dnsmessage.ResourceBody // by name in lower case
}

// ServeDNS runs a server without records until the test ends.
func ServeDNS(t testing.TB) *DNSServer {
	t.Helper()
	conn, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &DNSServer{conn: conn, done: make(chan struct{}), records: map[string][]dnsmessage.ResourceBody{}}
	go s.run()
	t.Cleanup(func() {
		conn.Close()
		<-s.done
	})
	return s
}

// Address is where the server listens.
func (s *DNSServer) Address() string { return s.conn.LocalAddr().String() }

// Resolver asks the server.
func (s *DNSServer) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", s.Address())
	}}
}

// Set makes the records of a name, which ends with a dot. Without any there is no such name.
func (s *DNSServer) Set(name string, records ...dnsmessage.ResourceBody) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.records, name); len(records) > 0 {
		s.records[name] = records
	}
}

// AddressRecord is an A or AAAA record.
func AddressRecord(text string) dnsmessage.ResourceBody {
	a := netip.MustParseAddr(text)
	if a.Is4() {
		return &dnsmessage.AResource{A: a.As4()}
	}
	return &dnsmessage.AAAAResource{AAAA: a.As16()}
}

// ServiceRecord is an SRV record. target ends with a dot.
func ServiceRecord(target string, port uint16) dnsmessage.ResourceBody {
	return &dnsmessage.SRVResource{Target: dnsmessage.MustNewName(target), Port: port}
}

func (s *DNSServer) run() {
	defer close(s.done)
	buffer := make([]byte, 4096)
	for {
		n, from, err := s.conn.ReadFrom(buffer)
		if err != nil {
			return
		}
		if answer := s.answer(buffer[:n]); answer != nil {
			_, _ = s.conn.WriteTo(answer, from)
		}
	}
}

func (s *DNSServer) answer(query []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var m dnsmessage.Message
	if m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	m.Response, m.Additionals = true, nil
	records, known := s.records[strings.ToLower(q.Name.String())]
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, body := range records {
		h := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 1}
		switch body.(type) {
		case *dnsmessage.AResource:
			h.Type = dnsmessage.TypeA
		case *dnsmessage.AAAAResource:
			h.Type = dnsmessage.TypeAAAA
		case *dnsmessage.SRVResource:
			h.Type = dnsmessage.TypeSRV
		}
		if h.Type == q.Type {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: body})
		}
	}
	answer, err := m.Pack()
	if err != nil {
		return nil
	}
	return answer
}
