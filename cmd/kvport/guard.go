package main

import (
	"fmt"
	"mime"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/kvport/kvport/engine/server"
)

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
