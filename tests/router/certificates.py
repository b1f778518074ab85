"""A certificate authority of the test's own, and what it signs."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: str, name: str = "ca") -> None:
        self.folder = Path(folder)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(True, 0), True)
        self.certificate = signed.sign(self.key, hashes.SHA256())
        self.file = self._write(f"{name}.pem", self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
        """A new key and certificate for `host`: the files of the certificate and of the key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        try:
            known: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            known = x509.DNSName(host)
        builder = self._builder(subject, key).add_extension(x509.SubjectAlternativeName([known]), False)
        signed = builder.sign(self.key, hashes.SHA256())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        certificate = signed.public_bytes(serialization.Encoding.PEM)
        return self._write(f"{name}.crt", certificate), self._write(f"{name}.key", pem)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )

    def _write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)
