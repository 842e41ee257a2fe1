package main

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/server"
)

// drainTime is how long a signalled process may take to finish what it has, by default; closeTime is
// what the engine and its plugin have of it at least.
const (
	drainTime = 10 * time.Second
	closeTime = 2 * time.Second
)

// listenFlags are the flags of commands that listen.
type listenFlags struct {
	host       string
	port       int
	apiKeyFile string
	open       bool

	allowedHosts   []string
	maxConnections int
	drainTimeout   time.Duration

	certificate serverCertificate
}

func (f *listenFlags) add(cmd *cobra.Command, port int) {
	flags := cmd.Flags()
	flags.StringVar(&f.host, "host", "127.0.0.1", "address to listen on")
	flags.IntVar(&f.port, "port", port, "port to listen on; 0 picks a free one, see the ready line")
	flags.StringVar(&f.apiKeyFile, "api-key-file", "", "file with clients' names, the hashes of their API keys and their limits, as kvport keys api add makes it, or with API keys, one a line; clients send one as bearer token; SIGHUP makes kvport read it again")
	flags.BoolVar(&f.open, "allow-unauthenticated", false, "listen beyond loopback without API keys")
	flags.StringSliceVar(&f.allowedHosts, "allowed-host", nil, "names that the Host header may have in addition to localhost and --host; beyond loopback any name is accepted unless one is given")
	flags.IntVar(&f.maxConnections, "max-connections", 0, "connections at once at most, of which the longest idle one makes room for a new one (default from the limit of open files)")
	f.certificate.files.addTLS(cmd)
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTime, "how long the process may take to end after SIGTERM or SIGINT; requests that run have four fifths of it")
}

// listener checks the flags and opens the port.
func (f *listenFlags) listen() (*net.TCPListener, *apikeys.Keys, error) {
	if err := errors.Join(f.checkLimits(), f.certificate.open()); err != nil {
		return nil, nil, err
	}
	var keys *apikeys.Keys
	if f.apiKeyFile != "" {
		var err error
		if keys, err = apikeys.Load(f.apiKeyFile); err != nil {
			return nil, nil, fmt.Errorf("--api-key-file: %w", err)
		}
	}
	addr, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(f.host, strconv.Itoa(f.port)))
	if err != nil {
		return nil, nil, fmt.Errorf("--host: %w", err)
	}
	if !addr.IP.IsLoopback() && keys == nil && !f.open {
		return nil, nil, fmt.Errorf("--host %q is not loopback: give --api-key-file, or --allow-unauthenticated to let anybody in", f.host)
	}
	f.tellClearText(addr, keys)
	l, err := net.ListenTCP("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, nil, fmt.Errorf("--port: %d is taken, another process listens there; give another one, or 0 for a free one: %w", f.port, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, nil, fmt.Errorf("--host: this machine has no address %s: %w", addr.IP, err)
	case err != nil:
		return nil, nil, fail(err)
	}
	return l, keys, nil
}

// tellClearText warns of keys that others on the network may read.
func (f *listenFlags) tellClearText(addr *net.TCPAddr, keys *apikeys.Keys) {
	if !addr.IP.IsLoopback() && keys != nil && f.certificate.scheme() == "http" {
		slog.Warn("API keys, prompts and answers cross the network in clear text unless a proxy in front encrypts them: --tls-cert-file and --tls-key-file do", "host", f.host)
	}
}

// checkLimits refuses numbers that cannot work.
func (f *listenFlags) checkLimits() error {
	most := descriptors() / 2
	switch {
	case f.port < 0 || f.port > 65535:
		return fmt.Errorf("--port is %d, want 0 to 65535", f.port)
	case f.drainTimeout < 0:
		return fmt.Errorf("--drain-timeout is %s, want 0s or more", f.drainTimeout)
	case f.maxConnections != 0 && (f.maxConnections < fewestConnections || f.maxConnections > most):
		return fmt.Errorf("--max-connections is %d, want %d to %d, half of the files that this process may open", f.maxConnections, fewestConnections, most)
	}
	return nil
}

// connections is how many there may be.
func (f *listenFlags) connections() int {
	if f.maxConnections > 0 {
		return f.maxConnections
	}
	return defaultConnections()
}

// inFlight is how many requests may run at once: fewer than there are connections, so that a health check
// always gets through.
func (f *listenFlags) inFlight(most int) int {
	return min(most, f.connections()*3/4)
}

// names are the hosts that a listener answers for. A web page can make a browser take any name for this
// machine (DNS rebinding) and then read the answers, but it cannot make the browser send another Host
// header.
type names struct {
	any       bool     // all
	addresses bool     // all IP addresses: no page can have such a name
	listed    []string // in lower case
}

// hostNames are the names of a listener at addr. Without flags, one on loopback answers for this machine
// alone. One beyond loopback is there to be reached by names that nobody here can know: what keeps pages
// out is that they have no API key, or the operator has let everybody in.
func hostNames(addr *net.TCPAddr, host string, allowed []string) names {
	n := names{listed: []string{"localhost", strings.ToLower(host)}}
	for _, name := range allowed {
		n.listed = append(n.listed, strings.ToLower(bareHost(name)))
	}
	if !addr.IP.IsLoopback() {
		n.any, n.addresses = len(allowed) == 0, true
	}
	return n
}

// bareHost is a Host header without its port.
func bareHost(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.TrimSuffix(strings.Trim(host, "[]"), ".")
}

func (n *names) has(host string) bool {
	if n.any || host == "" { // only HTTP/1.0 has none, and no browser speaks that
		return true
	}
	name := strings.ToLower(bareHost(host))
	if ip := net.ParseIP(name); ip != nil && (n.addresses || ip.IsLoopback()) {
		return true
	}
	return slices.Contains(n.listed, name)
}

// fromBrowsers keeps web pages from using this machine's API through the browser of somebody who visits
// them: it refuses names that are not the server's, and POSTs that come from a page of another origin.
func (n *names) fromBrowsers(next http.Handler) http.Handler {
	cross := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !n.has(r.Host):
			refuse(w, http.StatusForbidden, "host_not_allowed", fmt.Sprintf("the Host header is %.100q, which is not a name of this server: it answers for %s; give --allowed-host for another name",
				r.Host, strings.Join(n.said(), ", ")))
		case cross.Check(r) != nil:
			refuse(w, http.StatusForbidden, "cross_origin", "the request comes from a web page of another origin, says its Origin or Sec-Fetch-Site header: such a page may not use this server")
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// said are the names for a message.
func (n *names) said() []string {
	list := []string{"localhost", "127.0.0.1", "[::1]"}
	for _, name := range n.listed {
		if !slices.Contains(list, name) && name != "::1" {
			list = append(list, name)
		}
	}
	return list
}

// isJSON refuses bodies of other kinds. The kinds that a page can send to other origins without being
// asked are among them, and what curl sends without a header. A POST without a body needs no kind.
func isJSON(w http.ResponseWriter, r *http.Request) bool {
	given := r.Header.Get("Content-Type")
	kind, _, _ := mime.ParseMediaType(given) // of what cannot be parsed it is empty
	if r.Method != http.MethodPost || kind == "application/json" || (r.ContentLength == 0 && given == "") {
		return true
	}
	refuse(w, http.StatusUnsupportedMediaType, "unsupported_media_type",
		fmt.Sprintf("the Content-Type header is %.100q, want application/json (curl: -H 'Content-Type: application/json')", given))
	return false
}

// refuse answers with an error. A body that has not come is not waited for.
func refuse(w http.ResponseWriter, status int, code, message string) {
	kind := "invalid_request_error"
	if status >= http.StatusInternalServerError {
		kind = "server_error"
	}
	w.Header().Set("Connection", "close")
	e := &server.Error{Status: status, Kind: kind, Code: code, Message: message}
	e.Write(w)
}

const (
	mostConnections   = 2048      // by default, where the process may have many more descriptors
	fewestConnections = 8         // fewer leave no room for probes while requests run
	mostComing        = 256 << 20 // bytes of bodies that have not come whole yet, of all connections together
)

// How long a client may take for a body, and for an answer that is no stream.
const clientTime = 30 * time.Second

// descriptors is how many files this process may have open.
func descriptors() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return int(min(limit.Cur, 1<<20))
}

// defaultConnections leaves most descriptors to the engine, its connector and a router's upstreams.
func defaultConnections() int {
	return max(fewestConnections, min(mostConnections, descriptors()/4))
}

// gate is a listener that has a limited number of connections. When one more comes, the one that has
// waited for its client longest is closed: idle, before the end of a header, or before the end of a body.
// So nobody can lock others out by opening connections and leaving them. Requests that run are never
// closed.
type gate struct {
	*net.TCPListener
	most       int
	mostComing int64

	mu      sync.Mutex
	open    int
	waiting list.List // of *connection: those that wait for their client, the longest first
	coming  int64     // bytes of bodies that have not come whole
}

// connection is one of a gate's.
type connection struct {
	*net.TCPConn
	gate *gate

	// The gate's mu guards these.
	gone   bool
	place  *list.Element // among those that wait; nil: a request runs
	coming int64         // bytes of its body so far
}

func newGate(l *net.TCPListener, most int) *gate {
	return &gate{TCPListener: l, most: most, mostComing: mostComing}
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	for {
		tcp, err := g.AcceptTCP()
		if err != nil {
			return nil, err
		}
		c := &connection{TCPConn: tcp, gate: g}
		if g.admit(c) {
			return c, nil
		}
		_ = tcp.Close() // requests run on all others
	}
}

// admit makes room for a connection.
func (g *gate) admit(c *connection) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.open >= g.most {
		oldest := g.waiting.Front()
		if oldest == nil {
			return false
		}
		g.closeLocked(oldest)
	}
	g.open++
	c.place = g.waiting.PushBack(c)
	return true
}

// closeLocked closes a connection that waits. The caller holds mu.
func (g *gate) closeLocked(place *list.Element) {
	c, ok := place.Value.(*connection)
	if !ok {
		return
	}
	g.forgetLocked(c)
	_ = c.TCPConn.Close() // nobody is told: it was in the middle of nothing, or too slow
}

func (g *gate) forgetLocked(c *connection) {
	if c.gone {
		return
	}
	c.gone = true
	g.open--
	g.leaveLocked(c)
}

// leaveLocked takes a connection from those that wait.
func (g *gate) leaveLocked(c *connection) {
	if c.place != nil {
		g.waiting.Remove(c.place)
		c.place = nil
	}
	g.coming -= c.coming
	c.coming = 0
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.gate.mu.Lock()
	c.gate.forgetLocked(c)
	c.gate.mu.Unlock()
	return c.TCPConn.Close()
}

// runs says that the connection's request has come whole.
func (c *connection) runs() {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	c.gate.leaveLocked(c)
}

// waits says that the next move is the client's, from now on.
func (c *connection) waits() {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	c.gate.leaveLocked(c)
	if !c.gone {
		c.place = c.gate.waiting.PushBack(c)
	}
}

// took counts n bytes of a body. If all bodies together are too large, those whose clients take longest
// are not waited for any more, be it this one.
func (c *connection) took(n int) {
	g := c.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.gone || c.place == nil {
		return
	}
	c.coming += int64(n)
	g.coming += int64(n)
	for place := g.waiting.Front(); place != nil && g.coming > g.mostComing; {
		next := place.Next()
		if other, ok := place.Value.(*connection); ok && other.coming > 0 {
			g.closeLocked(place)
		}
		place = next
	}
}

type connectionKey struct{}

// withConnection lets a request's handler find its connection.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	if secure, is := c.(*tls.Conn); is {
		c = secure.NetConn()
	}
	return context.WithValue(ctx, connectionKey{}, c)
}

func connectionOf(ctx context.Context) *connection {
	c, _ := ctx.Value(connectionKey{}).(*connection)
	return c
}

// body tells when a request has come whole.
type body struct {
	io.ReadCloser
	took  func(n int)
	whole func()
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.took(n)
	}
	if err == io.EOF && b.whole != nil {
		b.whole()
		b.whole = nil
	}
	return n, err
}

// bounded limits how long a client may take for its body and for its answer, where the handler does
// not do so itself. It calls begin when a POST has come whole, and what that gives when its handler
// returns.
func bounded(next http.Handler, begin func() (end func())) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := connectionOf(r.Context())
		control := http.NewResponseController(w)
		var limit time.Time // none: a POST's handler sets its own before it writes
		if r.Method != http.MethodPost {
			limit = time.Now().Add(clientTime)
		}
		_ = control.SetWriteDeadline(limit)
		end := func() {}
		whole := func() {
			if r.Method == http.MethodPost {
				c.runs()
				end = begin()
			}
		}
		c.waits() // for the rest of the request; what came before does not count any more
		if r.ContentLength == 0 {
			whole()
		} else {
			_ = control.SetReadDeadline(time.Now().Add(clientTime))
			r.Body = &body{ReadCloser: r.Body, took: c.took, whole: func() {
				_ = control.SetReadDeadline(time.Time{}) // from here on a read only notices that the client left
				whole()
			}}
		}
		defer func() {
			end()
			c.waits()
			_ = control.SetWriteDeadline(time.Now().Add(clientTime)) // for what is still in the buffer
		}()
		next.ServeHTTP(w, r)
	})
}
